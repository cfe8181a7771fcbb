"""Refuses execution settings that cannot work, before any process starts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from flowmill.configs.components import reward_sections
from flowmill.configs.errors import ConfigError
from flowmill.configs.refusals import Refusal, refuse
from flowmill.configs.schema import RunConfig
from flowmill.models.devices import chosen_device
from flowmill.models.memory.architectures import architecture_of, meta_denoiser
from flowmill.models.policies.attention import UNSPLIT
from flowmill.models.weights.context_parallel import token_plan
from flowmill.tasks.execution.launchers import check_launcher
from flowmill.tasks.execution.runners import check_runner
from flowmill.tasks.inputs.resolved import ResolvedConfig
from flowmill.tasks.inputs.row_tokens import image_tokens, text_tokens


def _sharding(config: RunConfig) -> Iterator[Refusal]:
    execution, ranks = config.execution, config.execution.ranks
    strategy, sharded, size = execution.strategy, execution.strategy == "fsdp", execution.fsdp_size
    whole = f"execution.strategy '{strategy}' keeps whole weights on every rank"
    if sharded and ranks == 1:
        yield Refusal(
            "execution.strategy",
            "there is one process, which has no other to share weights with",
            "Set execution.processes to 2 or more, or strategy to 'ddp'",
        )
    if size is not None and not sharded:
        yield Refusal("execution.fsdp_size", whole, "Set strategy to 'fsdp', or remove fsdp_size")
    if size is not None and ranks % size:
        yield Refusal(
            "execution.fsdp_size",
            f"there are {ranks} processes, which cannot be put in groups of {size} that each hold all weights",
            f"Set execution.processes times execution.nodes to a multiple of {size}, or remove it",
        )
    if size is not None and size % execution.context_parallel:
        yield Refusal(
            "execution.fsdp_size",
            f"{execution.context_parallel} processes share the tokens of each row (execution.context_parallel), which "
            "must be in one group",
            "Set fsdp_size to a multiple of that",
        )
    if execution.parameters_in_host and not sharded:
        value = "true" if execution.offload is True else repr(execution.offload)
        yield Refusal(
            "execution.offload",
            f"execution.strategy '{strategy}' keeps weights on devices",
            "Set strategy to 'fsdp', offload to 'optimizer', which moves the moments alone, or offload to false",
            f"execution.offload is {value}, but",
        )
    if execution.sampling == "spread" and not sharded:
        yield Refusal("execution.sampling", whole, "Set strategy to 'fsdp', or sampling to 'whole'")
    if sharded and config.model.compile:
        why = "execution.strategy 'fsdp' wraps the blocks itself"
        yield Refusal("model.compile", why, "Remove one of them", "model.compile is set, but")


def _split_tokens(config: RunConfig) -> Iterator[Refusal]:
    model, ranks, degree = config.model, config.execution.ranks, config.execution.context_parallel
    if ranks % degree:
        yield Refusal(
            "execution.context_parallel",
            f"there are {ranks} processes, which cannot be put in groups of {degree}",
            f"Set execution.processes times execution.nodes to a multiple of {degree}",
        )
    if degree > 1 and model.policy in UNSPLIT:
        yield Refusal(
            "execution.context_parallel",
            f"diffusers does not say how the tokens of model.policy '{model.policy}' are split over processes",
            "Set it to 1",
        )
    if degree > 1 and model.compile:
        why = "model.compile is set, which does not go with it"
        yield Refusal("execution.context_parallel", why, "Remove one of them")


def check_execution(plan: ResolvedConfig) -> None:
    """Check launcher, runner, devices, and the sharding of weights and tokens over processes."""
    config = plan.config
    check_launcher(config.execution)
    check_runner(config.execution)
    check_devices(config)
    refuse(config, chain(_sharding(config), _split_tokens(config)))
    if config.execution.context_parallel > 1:
        _check_tokens(plan)


def check_devices(config: RunConfig) -> None:
    """Check that this machine has the configured devices of models and rewards, if the run executes here."""
    execution = config.execution
    if execution.nodes > 1 or (execution.ranks > 1 and execution.launcher.name != "local"):
        return
    if execution.device != "cpu":
        chosen_device(execution.device, execution.processes - 1)
    for section in reward_sections(config):
        if section.server is None and section.device not in (None, "cpu"):
            chosen_device(str(section.device), label=f"rewards: device of '{section.slot}'")


def _check_tokens(plan: ResolvedConfig) -> None:
    """Check that the heads and tokens of a model of a supported architecture can be split evenly."""
    model, degree = plan.config.model, plan.config.execution.context_parallel
    architecture = None if model.path is None else architecture_of(model.path)
    if architecture is None:
        return
    where = f"execution.context_parallel is {degree}"
    if plan.family_spec.references is not None and plan.most_images:
        raise ConfigError(
            f"{where}, but the images that prompts of model.policy '{model.policy}' start from differ in their "
            "numbers of tokens, which cannot be shared out evenly. Set it to 1."
        )
    token_plan(meta_denoiser(architecture), degree)
    for section, called in (("model", plan), ("evaluate", plan.evaluated)):
        image = image_tokens(called, architecture)
        if image % degree:
            raise ConfigError(
                f"{where}, but a row has {image} tokens, which that does not divide. Change {section}.height or "
                f"{section}.width."
            )
    text = text_tokens(plan, architecture)
    if text % degree:
        raise ConfigError(
            f"{where}, but a row has {text} text tokens, which that does not divide. Set "
            f"model.options.max_sequence_length to a multiple of {degree}."
        )
