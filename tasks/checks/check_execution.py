"""Refuses execution settings that cannot work, before any process starts."""

from __future__ import annotations

from flowmill.configs.components import reward_sections
from flowmill.configs.errors import ConfigError
from flowmill.configs.refusals import Rule, refuse
from flowmill.configs.schema import RunConfig
from flowmill.models.devices import chosen_device
from flowmill.models.memory.architectures import architecture_of, meta_denoiser
from flowmill.models.policies import REFERENCES, most_images
from flowmill.models.policies.attention import UNSPLIT
from flowmill.models.weights.context_parallel import token_plan
from flowmill.tasks.execution.launchers import check_launcher
from flowmill.tasks.execution.runners import check_runner
from flowmill.tasks.inputs.components import as_evaluated
from flowmill.tasks.inputs.row_tokens import image_tokens, text_tokens

EXECUTION: tuple[Rule[RunConfig], ...] = (
    Rule("execution.strategy", lambda c, strategy: strategy == "fsdp" and c.execution.ranks == 1,
         "there is one process, which has no other to share weights with",
         "Set execution.processes to 2 or more, or strategy to 'ddp'"),
    Rule("execution.fsdp_size", lambda c, _: c.execution.strategy != "fsdp",
         "execution.strategy '{execution.strategy}' keeps whole weights on every rank",
         "Set strategy to 'fsdp', or remove fsdp_size"),
    Rule("execution.fsdp_size", lambda c, size: c.execution.ranks % size,
         "there are {execution.ranks} processes, which cannot be put in groups of {value} that each hold all weights",
         "Set execution.processes times execution.nodes to a multiple of {value}, or remove it"),
    Rule("execution.fsdp_size", lambda c, size: size % c.execution.context_parallel,
         "{execution.context_parallel} processes share the tokens of each row (execution.context_parallel), which must "
         "be in one group",
         "Set fsdp_size to a multiple of that"),
    Rule("execution.offload",
         lambda c, offload: c.execution.parameters_in_host and c.execution.strategy != "fsdp" and
         ("true" if offload is True else repr(offload)),
         "execution.strategy '{execution.strategy}' keeps weights on devices",
         "Set strategy to 'fsdp', offload to 'optimizer', which moves the moments alone, or offload to false",
         where="{setting} is {found}, but"),
    Rule("execution.sampling", lambda c, sampling: sampling == "spread" and c.execution.strategy != "fsdp",
         "execution.strategy '{execution.strategy}' keeps whole weights on every rank",
         "Set strategy to 'fsdp', or sampling to 'whole'"),
    Rule("model.compile model.device_map", lambda c, value: value and c.execution.strategy == "fsdp",
           "execution.strategy 'fsdp' places and wraps the blocks itself",
           "Remove one of them", where="{setting} is set, but"),
    Rule("execution.context_parallel", lambda c, degree: c.execution.ranks % degree,
         "there are {execution.ranks} processes, which cannot be put in groups of {value}",
         "Set execution.processes times execution.nodes to a multiple of {value}"),
    Rule("execution.context_parallel", lambda c, degree: degree > 1 and c.model.policy in UNSPLIT,
         "diffusers does not say how the tokens of model.policy '{model.policy}' are split over processes",
         "Set it to 1"),
    Rule("execution.context_parallel",
         lambda c, degree: degree > 1 and ("compile" if c.model.compile else c.model.device_map and "device_map"),
         "model.{found} is set, which does not go with it",
         "Remove one of them"),
)  # fmt: skip


def check_execution(config: RunConfig) -> None:
    """Check launcher, runner, devices, and the sharding of weights and tokens over processes."""
    check_launcher(config.execution)
    check_runner(config.execution)
    check_devices(config)
    refuse(EXECUTION, config)
    if config.execution.context_parallel > 1:
        _check_tokens(config)


def check_devices(config: RunConfig) -> None:
    """Check that this machine has the configured devices of models and rewards, if the run executes here."""
    execution = config.execution
    if execution.nodes > 1 or (execution.ranks > 1 and execution.launcher.name != "local"):
        return
    if execution.device != "cpu":
        chosen_device(execution.device, execution.processes - 1)
    if execution.render_device not in (None, "cpu"):
        chosen_device(str(execution.render_device), label="execution.render_device")
    if config.critic.device not in (None, "cpu"):
        chosen_device(str(config.critic.device), label="critic.device")
    for section in reward_sections(config):
        if section.server is None and section.device not in (None, "cpu"):
            chosen_device(str(section.device), label=f"rewards: device of '{section.slot}'")


def _check_tokens(config: RunConfig) -> None:
    """Check that the heads and tokens of a model of a supported architecture can be split evenly."""
    architecture = None if config.model.path is None else architecture_of(config.model.path)
    if architecture is None:
        return
    model, degree = config.model, config.execution.context_parallel
    where = f"execution.context_parallel is {degree}"
    if model.policy in REFERENCES and most_images(model.policy, model.options):
        raise ConfigError(
            f"{where}, but the images that prompts of model.policy '{model.policy}' start from differ in their "
            "numbers of tokens, which cannot be shared out evenly. Set it to 1."
        )
    token_plan(meta_denoiser(architecture), degree)
    for section, called in (("model", config), ("evaluate", as_evaluated(config))):
        image = image_tokens(called, architecture)
        if image % degree:
            raise ConfigError(
                f"{where}, but a row has {image} tokens, which that does not divide. Change {section}.height or "
                f"{section}.width."
            )
    text = text_tokens(config, architecture)
    if text % degree:
        raise ConfigError(
            f"{where}, but a row has {text} text tokens, which that does not divide. Set "
            f"model.options.max_sequence_length to a multiple of {degree}."
        )
