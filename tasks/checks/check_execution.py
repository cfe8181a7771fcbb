"""Refuses execution settings that cannot work, before any process starts."""

from __future__ import annotations

from configs.components import reward_sections
from configs.errors import ConfigError
from configs.execution import ExecutionSection
from configs.schema import RunConfig
from models.devices import chosen_device
from models.memory.architectures import architecture_of, meta_denoiser
from models.policies import REFERENCES, most_images
from models.policies.attention import UNSPLIT
from models.weights.context_parallel import token_plan
from tasks.execution.launchers import check_launcher
from tasks.execution.runners import check_runner
from tasks.inputs.components import as_evaluated
from tasks.inputs.row_tokens import image_tokens, text_tokens


def check_execution(config: RunConfig) -> None:
    """Check launcher, runner, devices, and the sharding of weights and tokens over processes.

    Raises:
        ConfigError: a setting cannot work, or has no effect.
    """
    check_launcher(config.execution)
    check_runner(config.execution)
    check_devices(config)
    _check_strategy(config)
    if config.execution.context_parallel > 1:
        _check_shares(config)
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


def _check_strategy(config: RunConfig) -> None:
    execution, model = config.execution, config.model
    if execution.strategy == "fsdp" and execution.ranks == 1:
        raise ConfigError(
            "execution.strategy is 'fsdp', but there is one process, which has no other to share weights with. Set "
            "execution.processes to 2 or more, or strategy to 'ddp'."
        )
    if execution.fsdp_size is not None:
        _check_groups(execution, execution.fsdp_size)
    if execution.parameters_in_host and execution.strategy != "fsdp":
        value = "true" if execution.offload is True else f"'{execution.offload}'"
        raise ConfigError(
            f"execution.offload is {value}, but execution.strategy '{execution.strategy}' keeps weights on devices. "
            "Set strategy to 'fsdp', offload to 'optimizer', which moves the moments alone, or offload to false."
        )
    if execution.sampling == "spread" and execution.strategy != "fsdp":
        raise ConfigError(
            f"execution.sampling is 'spread', but execution.strategy '{execution.strategy}' keeps whole weights on "
            "every rank. Set strategy to 'fsdp', or sampling to 'whole'."
        )
    if execution.strategy == "fsdp" and (model.compile or model.device_map):
        odd = "compile" if model.compile else "device_map"
        raise ConfigError(
            f"model.{odd} is set, but execution.strategy 'fsdp' places and wraps the blocks itself. Remove one of them."
        )


def _check_groups(execution: ExecutionSection, size: int) -> None:
    where = f"execution.fsdp_size is {size}"
    if execution.strategy != "fsdp":
        raise ConfigError(
            f"{where}, but execution.strategy '{execution.strategy}' keeps whole weights on every rank. Set strategy "
            "to 'fsdp', or remove fsdp_size."
        )
    if execution.ranks % size:
        raise ConfigError(
            f"{where}, but there are {execution.ranks} processes, which cannot be put in groups of {size} that each "
            f"hold all weights. Set execution.processes times execution.nodes to a multiple of {size}, or remove it."
        )
    if size % execution.context_parallel:
        raise ConfigError(
            f"{where}, but {execution.context_parallel} processes share the tokens of each row "
            "(execution.context_parallel), which must be in one group. Set fsdp_size to a multiple of that."
        )


def _check_shares(config: RunConfig) -> None:
    execution, model = config.execution, config.model
    degree, where = execution.context_parallel, f"execution.context_parallel is {execution.context_parallel}"
    if execution.ranks % degree:
        raise ConfigError(
            f"{where}, but there are {execution.ranks} processes, which cannot be put in groups of {degree}. Set "
            f"execution.processes times execution.nodes to a multiple of {degree}."
        )
    if model.policy in UNSPLIT:
        raise ConfigError(
            f"{where}, but diffusers does not say how the tokens of model.policy '{model.policy}' are split over "
            "processes. Set it to 1."
        )
    if model.compile or model.device_map:
        odd = "compile" if model.compile else "device_map"
        raise ConfigError(f"{where}, but model.{odd} is set, which does not go with it. Remove one of them.")


def _check_tokens(config: RunConfig) -> None:
    """Check that the heads and tokens of a model of known architecture can be split evenly."""
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
