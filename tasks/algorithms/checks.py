"""Refuses settings of advantages and replay that have no effect, or another effect than they name. Pure.

``flowmill.tasks.checks.check`` and the modalities call these functions before any work.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from flowmill.configs.advantages import ReplaySection
from flowmill.configs.base import Section
from flowmill.configs.refusals import Refusal, refuse
from flowmill.configs.schema import RunConfig
from flowmill.configs.suggestions import did_you_mean
from flowmill.tasks.algorithms.forward import ForwardProcess

if TYPE_CHECKING:
    from flowmill.tasks.algorithms.base import Requirements


def _statistics(config: RunConfig) -> Iterator[Refusal]:
    advantage = config.advantage
    if advantage.aggregation == "gdpo" and advantage.std != "group":
        yield Refusal(
            "advantage.std",
            "advantage.aggregation 'gdpo' divides every reward by the std of its group and their sum by that of the "
            "epoch, as Flow-Factory does for either value of global_std",
            "Set advantage.std to 'group', or the aggregation to 'sum'",
        )
    if advantage.std == "running" and advantage.min_count > advantage.buffer:
        yield Refusal(
            "advantage.min_count",
            "no prompt would ever have enough rewards for its own statistics",
            "Lower min_count to buffer or less",
            f"advantage.min_count is {advantage.min_count} and advantage.buffer {advantage.buffer}, so",
        )
    if advantage.mean == "leave_one_out" and advantage.std != "none":
        yield Refusal(
            "advantage.mean",
            f"advantage.std is '{advantage.std}', so the leave-one-out mean would only change the scale",
            "Set advantage.std to 'none', or mean to 'group'",
        )
    if advantage.mean == "global" and advantage.std != "global":
        yield Refusal(
            "advantage.mean",
            f"advantage.std is '{advantage.std}': rewards centered on the mean of all samples need the std of all "
            "samples",
            "Set advantage.std to 'global', or mean to 'group'",
        )
    low, high = advantage.group_mean_min, advantage.group_mean_max
    if low is not None and high is not None and low > high:
        yield Refusal(
            "advantage.group_mean_min",
            "no group could be trained on",
            "Swap them",
            f"advantage.group_mean_min is {low} and advantage.group_mean_max {high}, so",
        )


def _groups_and_monitors(config: RunConfig) -> Iterator[Refusal]:
    """Yield settings of advantages that lack the groups, monitors or KL that they act on."""
    advantage = config.advantage
    monitors = [monitor.slot for monitor in config.monitors]
    if advantage.diversity is not None and advantage.diversity not in monitors:
        yield Refusal(
            "advantage.diversity",
            "no monitor has this name",
            f"{did_you_mean(advantage.diversity, monitors)} Add one to monitors, "
            "{name: diversity, options: {to: nearest}} for instance, or remove advantage.diversity",
        )
    if advantage.kl_gate is not None and advantage.kl_coef == 0:
        yield Refusal(
            "advantage.kl_gate",
            "advantage.kl_coef is 0, so there is nothing to gate",
            "Set it, or remove advantage.kl_gate",
        )
    if advantage.kl_gate is not None and set(monitors) <= {advantage.diversity}:
        yield Refusal(
            "advantage.kl_gate",
            "there are no monitors to doubt a reward by, so there is nothing to gate",
            "Set it, or remove advantage.kl_gate",
        )


def _informative(config: RunConfig, groups: int, size: int) -> Iterator[Refusal]:
    informative, rollout = config.advantage.informative, config.rollout
    if informative is not None and informative > groups:
        yield Refusal(
            "advantage.informative",
            f"an epoch has {groups} groups (rollout.prompts_per_epoch {rollout.prompts_per_epoch})",
            "Raise that, best to twice the groups or more, or lower advantage.informative",
        )
    if informative is not None and size == 1:
        yield Refusal(
            "advantage.informative",
            "rollout.group_size is 1, and one reward equals itself",
            "Raise group_size, or remove advantage.informative",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A config and the requirements of its algorithm."""

    config: RunConfig
    requires: Requirements

    @property
    def algorithm(self) -> str:
        """The algorithm with its config key, for messages."""
        return _named(self.config)

    @property
    def group(self) -> int:
        """Number of samples that are compared."""
        return self.config.samples_per_group


def _named(config: RunConfig) -> str:
    return f"optimize.algorithm '{config.optimize.algorithm.name}'"


def compared_rows(facts: Trained) -> Iterator[Refusal]:
    """Yield a micro-batch that is smaller than the rows that the algorithm compares."""
    unit, size, group = facts.requires.unit, facts.config.execution.micro_batch_size, facts.group
    if unit == "pair" and size < 2:
        yield Refusal(
            "execution.micro_batch_size",
            f"execution.micro_batch_size is {size}",
            "Set execution.micro_batch_size to 2 or more",
            f"{facts.algorithm} compares a group's best and worst sample in one forward, but",
        )
    if unit == "group" and size < group:
        branches = " times the plan's branches" * (group // facts.config.rollout.group_size > 1)
        yield Refusal(
            "execution.micro_batch_size",
            f"execution.micro_batch_size is {size}",
            f"Set execution.micro_batch_size to {group} or more",
            f"{facts.algorithm} compares whole groups in one forward, here of {group} samples (rollout.group_size"
            f"{branches}), but",
        )


def _replay(facts: Trained, replay: ReplaySection) -> Iterator[Refusal]:
    rollout, steps = facts.config.rollout, replay.steps
    if replay.epochs == 0:
        of_earlier = [name for name in ("share", "steps") if _is_set(replay, name)]
        if of_earlier or not facts.config.execution.ahead:
            yield Refusal(
                f"optimize.replay.{of_earlier[0] if of_earlier else 'epochs'}",
                "optimize.replay.epochs is 0, so no earlier epoch is trained on, and rows of older policies come from "
                "execution.ahead alone",
                "Set optimize.replay.epochs to 1 or more, or remove it",
            )
    if steps is not None and facts.requires.data == "forward":
        yield Refusal(
            "optimize.replay.steps",
            f"{facts.algorithm} noises final latents again and trains no steps",
            "Remove optimize.replay.steps",
        )
    if _is_set(replay, "max_importance") and facts.requires.data != "transitions":
        yield Refusal(
            "optimize.replay.max_importance",
            f"{facts.algorithm} compares no log-probs with those of older policies, so rows have no importance weights",
            "Remove it",
        )
    if steps is not None and steps >= rollout.steps:
        yield Refusal(
            "optimize.replay.steps",
            f"rollout.steps is {rollout.steps}, so no step would be left out",
            "Lower it, or remove optimize.replay.steps",
        )


def without_effect(config: RunConfig, algorithm: Any, plan: Any) -> Iterator[Refusal]:
    """Yield settings that have no effect next to others, other than those that an ablation switches off.

    Args:
        config: the config.
        algorithm: its algorithm.
        plan: its rollout plan; None where samples have no steps.
    """
    for why in _idle_options(algorithm):
        yield Refusal("optimize.algorithm.options", why, "Change or remove them", f"{_named(config)}:")
    still = plan.without_effect(config.rollout.steps) if hasattr(plan, "without_effect") else None
    if still is not None:
        name = config.rollout.plan.name
        yield Refusal("rollout.plan.options", still, "Lower the stride", f"rollout.plan '{name}':")
    if config.advantage.soft_clip is not None and _is_set(config.advantage, "clip"):
        yield Refusal(
            "advantage.clip",
            f"advantage.soft_clip is {config.advantage.soft_clip!r}, so it has no effect",
            "Remove one of them",
            "advantage.clip is set, but",
        )


def _idle_options(algorithm: Any) -> Iterator[str]:
    """Yield why options of an algorithm do nothing."""
    times, decay = algorithm.requires.times, algorithm.requires.decay
    reason = None if decay is None else decay.without_effect()
    if reason is not None:
        yield reason
    # Options of the same name of an algorithm of the user's own may be anything.
    if times is not None and isinstance(algorithm, ForwardProcess):
        own = algorithm.levels()
        for name in algorithm.times:
            if getattr(own, name) != getattr(times, name):
                yield f"{name} of times is {getattr(own, name)!r}, but this algorithm needs {getattr(times, name)!r}"


def switched_off(config: RunConfig, algorithm: Any, plan: Any) -> Iterator[str]:
    """Yield notes on settings that a coefficient of 0, a mode or a std switches off, as ablations do.

    Args: see ``without_effect``.
    """
    own, steps = _named(config), f"rollout.plan '{config.rollout.plan.name}'"
    for where, part in ((own, algorithm), (own, algorithm.requires.times), (steps, plan)):
        reason = part.switched_off() if hasattr(part, "switched_off") else None
        if reason is not None:
            yield f"{where}: {reason}."
    advantage = config.advantage
    idle = {
        ("buffer", "min_count"): ("std", advantage.std != "running"),
        ("unbiased", "epsilon", "floor"): ("std", advantage.std == "none"),
        ("best_of",): ("mode", advantage.mode == "best_worst"),
    }
    for names, (switch, off) in idle.items():
        for name in names:
            if off and _is_set(config.advantage, name):
                value = getattr(advantage, switch)
                yield f"advantage.{name} is set, but advantage.{switch} is {value!r}, so it has no effect."


def _is_set(section: Section, name: str) -> bool:
    """Return whether a setting has another value than by default."""
    return bool(getattr(section, name) != type(section).model_fields[name].default)


def check_advantage(config: RunConfig) -> None:
    """Check that settings of ``advantage`` fit each other."""
    refuse(config, chain(_statistics(config), _groups_and_monitors(config)))


def check_advantage_groups(config: RunConfig, *, groups: int, size: int) -> None:
    """Check that settings of ``advantage`` fit each other and the groups of an epoch.

    Args:
        config: the config.
        groups: groups of an epoch that are compared.
        size: samples of a group.
    """
    check_advantage(config)
    refuse(config, _informative(config, groups, size))


def check_replay(config: RunConfig, requires: Requirements) -> None:
    """Check that every setting of ``optimize.replay`` has the effect it names, with what the algorithm requires."""
    replay = config.optimize.replay
    if replay is not None:
        refuse(config, _replay(Trained(config=config, requires=requires), replay))
