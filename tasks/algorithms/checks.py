"""Refuses settings of advantages and replay that have no effect, or another effect than they name. Pure.

There is one function per config section; ``tasks.checks.check`` calls them before any work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from configs.advantages import AdvantageSection, ReplaySection
from configs.errors import ConfigError
from configs.schema import RunConfig
from configs.suggestions import did_you_mean
from tasks.advantages.estimators import make_estimator

if TYPE_CHECKING:
    from models.maths.transitions import Kernel
    from tasks.algorithms.base import Requirements


def check_advantage(config: RunConfig) -> None:
    """Check that every setting of ``advantage`` has the effect it names.

    Raises:
        ConfigError: two exclude each other, or one needs another to act.
    """
    section = config.advantage
    _check_estimated(config)
    _check_gdpo(section)
    _check_running(section)
    _check_undivided(section)
    if section.mean == "global" and section.std != "global":
        raise ConfigError(
            f"advantage.mean is 'global', but advantage.std is '{section.std}': rewards centered on the mean of all "
            "samples need the std of all samples. Set advantage.std to 'global', or mean to 'group'."
        )
    if section.threshold is None and section.below != 0:
        raise ConfigError(
            f"advantage.below is {section.below}, but it only acts on samples below advantage.threshold, which is not "
            "set. Set advantage.threshold, or remove advantage.below."
        )
    _check_informative(config)
    _check_diversity(config)
    doubting = [monitor for monitor in config.monitors if monitor.slot != section.diversity]
    if section.kl_gate is not None and (section.kl_coef == 0 or not doubting):
        missing = "advantage.kl_coef is 0" if section.kl_coef == 0 else "there are no monitors to doubt a reward by"
        raise ConfigError(
            f"advantage.kl_gate is {section.kl_gate}, but {missing}, so there is nothing to gate. Set it, or remove "
            "advantage.kl_gate."
        )
    if section.mode == "best_worst" and section.best_of is not None:
        raise ConfigError(
            f"advantage.best_of is {section.best_of}, but advantage.mode 'best_worst' always keeps one sample on "
            "either side. Remove one of the two."
        )
    _check_soft_clip(section)
    low, high = section.group_mean_min, section.group_mean_max
    if low is not None and high is not None and low > high:
        raise ConfigError(
            f"advantage.group_mean_min is {low} and advantage.group_mean_max {high}, so no group could be trained on. "
            "Swap them."
        )


def _check_estimated(config: RunConfig) -> None:
    """Check that no setting for advantages of samples is used with advantages of tokens."""
    section = config.advantage
    if not make_estimator(config).per_token:
        return
    for name, field in AdvantageSection.model_fields.items():
        value = getattr(section, name)
        if name not in ("estimator", "overlong", "informative") and value != field.get_default():
            raise ConfigError(
                f"advantage.{name} is {value!r}, but advantage.estimator '{section.estimator.name}' gives every token "
                f"an advantage of its own, for which it means nothing. Remove advantage.{name}, or the estimator."
            )


def _check_soft_clip(section: AdvantageSection) -> None:
    if section.soft_clip is None:
        return
    if section.clip != AdvantageSection.model_fields["clip"].default:
        raise ConfigError(
            f"advantage.clip is {section.clip}, but advantage.soft_clip {section.soft_clip} already bounds advantages. "
            "Remove one of the two."
        )
    if section.mode in ("binary", "best_worst"):
        raise ConfigError(
            f"advantage.soft_clip is {section.soft_clip}, but advantage.mode '{section.mode}' makes every advantage 1, "
            "0 or -1 regardless of its size. Remove one of the two."
        )


def _check_informative(config: RunConfig) -> None:
    wanted, rollout = config.advantage.informative, config.rollout
    if wanted is None:
        return
    if wanted > rollout.prompts_per_epoch:
        raise ConfigError(
            f"advantage.informative is {wanted}, but an epoch has rollout.prompts_per_epoch "
            f"{rollout.prompts_per_epoch} groups. Raise it, best to twice that or more, or lower "
            "advantage.informative."
        )
    if rollout.group_size == 1:
        raise ConfigError(
            f"advantage.informative is {wanted}, but rollout.group_size is 1, and one reward equals itself. Raise "
            "group_size, or remove advantage.informative."
        )


def _check_diversity(config: RunConfig) -> None:
    section, labels = config.advantage, [monitor.slot for monitor in config.monitors]
    if section.diversity is None:
        return
    if section.diversity not in labels:
        raise ConfigError(
            f"advantage.diversity is '{section.diversity}', but no monitor has this name. "
            f"{did_you_mean(section.diversity, labels)} Add one to monitors, {{name: diversity, options: "
            "{to: nearest}} for instance, or remove advantage.diversity."
        )
    if section.mode == "binary":
        raise ConfigError(
            f"advantage.diversity is '{section.diversity}', but advantage.mode 'binary' keeps the sign of an advantage "
            "alone, which it does not change. Remove one of the two."
        )


def _check_gdpo(section: AdvantageSection) -> None:
    if section.aggregation == "gdpo" and section.std != "group":
        raise ConfigError(
            f"advantage.std is '{section.std}', but advantage.aggregation 'gdpo' divides every reward by the std of "
            "its group and their sum by that of the epoch, as Flow-Factory does for either value of global_std. Set "
            "advantage.std to 'group', or the aggregation to 'sum'."
        )


def _check_undivided(section: AdvantageSection) -> None:
    if section.std != "none":
        if section.mean == "leave_one_out":
            raise ConfigError(
                f"advantage.mean is 'leave_one_out', but advantage.std is '{section.std}', so the leave-one-out mean "
                "would only change the scale. Set advantage.std to 'none', or mean to 'group'."
            )
        return
    for name in ("epsilon", "floor", "unbiased"):
        value = getattr(section, name)
        if value != AdvantageSection.model_fields[name].default:
            raise ConfigError(
                f"advantage.{name} is {value!r}, but with advantage.std 'none' there is no divisor. Remove it."
            )


def _check_running(section: AdvantageSection) -> None:
    if section.std == "running":
        if section.min_count > section.buffer:
            raise ConfigError(
                f"advantage.min_count is {section.min_count} and advantage.buffer {section.buffer}, so no prompt would "
                "ever have enough rewards for its own statistics. Lower min_count to buffer or less."
            )
        return
    for name, value in (("buffer", section.buffer), ("min_count", section.min_count)):
        if value != AdvantageSection.model_fields[name].default:
            raise ConfigError(
                f"advantage.{name} is {value}, but it only acts on advantage.std 'running', and that is "
                f"'{section.std}'. Remove it, or set advantage.std to 'running'."
            )


def check_replay(config: RunConfig, requires: Requirements, kernel: Kernel | None) -> None:
    """Check that every setting of ``optimize.replay`` has the effect it names.

    Args:
        config: the config.
        requires: requirements of its algorithm.
        kernel: the stochastic step of its rollouts; None if every step has a density.

    Raises:
        ConfigError: the algorithm or another setting leaves one without effect, or a weight has no meaning.
    """
    section, algorithm = config.optimize.replay, config.optimize.algorithm.name
    if section is None:
        return
    if not section.epochs and not config.execution.ahead:
        raise ConfigError(
            "optimize.replay.epochs is 0 and execution.ahead is 0, so every row is of the policy its epoch starts from "
            "and optimize.replay does nothing. Remove it, or raise one of the two."
        )
    _check_choice(section, requires, algorithm, config.rollout.steps)
    weights = {"weight": section.weight, "max_importance": section.max_importance, "level": section.level}
    changed = [name for name, value in weights.items() if value != ReplaySection.model_fields[name].default]
    if requires.data != "transitions":
        changed = [*changed, *(() if section.proximal else ("proximal",))]
        reason = f"optimize.algorithm '{algorithm}' does not use the log-probs of the policy that made the samples"
    else:
        changed = [] if section.proximal else changed
        reason = "it shapes importance weights, and there are none while optimize.replay.proximal is false"
    if changed:
        name = changed[0]
        raise ConfigError(f"optimize.replay.{name} is set, but {reason}. Remove optimize.replay.{name}.")
    sampler = config.rollout.sampler.name
    if section.weight == "density" and section.proximal and kernel is not None and not _has_densities(kernel):
        raise ConfigError(
            f"optimize.replay.weight is 'density', but the log-probs of rollout.sampler '{sampler}' are squared "
            "distances, no densities. Set its log_prob to 'gaussian', or the weight to 'tempered'."
        )


def check_units(config: RunConfig, requires: Requirements, group: int) -> None:
    """Check that the rows an algorithm compares fit in a micro-batch.

    Args:
        config: the config.
        requires: requirements of its algorithm.
        group: rows of a whole group.

    Raises:
        ConfigError: execution.micro_batch_size is too small.
    """
    size = config.execution.micro_batch_size
    needed = {"row": 1, "pair": 2, "group": group}[requires.unit]
    if size >= needed:
        return
    if requires.unit == "pair":
        label = "a group's best and worst sample in one forward"
    else:
        branches = group // config.rollout.group_size
        times = " times the plan's branches" if branches > 1 else ""
        label = f"whole groups in one forward, here of {needed} samples (rollout.group_size{times})"
    raise ConfigError(
        f"optimize.algorithm '{config.optimize.algorithm.name}' compares {label}, but execution.micro_batch_size is "
        f"{size}. Set execution.micro_batch_size to {needed} or more."
    )


def _check_choice(section: ReplaySection, requires: Requirements, algorithm: str, steps: int) -> None:
    if not section.epochs and (section.share != 1 or section.steps is not None):
        name, value = ("share", section.share) if section.share != 1 else ("steps", section.steps)
        raise ConfigError(
            f"optimize.replay.{name} is {value}, but optimize.replay.epochs is 0, so there is no earlier epoch to "
            f"choose from. Raise epochs, or remove optimize.replay.{name}."
        )
    if section.steps is None:
        return
    if requires.data == "forward":
        raise ConfigError(
            f"optimize.replay.steps is {section.steps}, but optimize.algorithm '{algorithm}' noises final latents "
            "again and trains no steps. Remove optimize.replay.steps."
        )
    if section.steps >= steps:
        raise ConfigError(
            f"optimize.replay.steps is {section.steps}, but rollout.steps is {steps}, so no step would be left out. "
            "Lower it, or remove optimize.replay.steps."
        )


def _has_densities(kernel: Kernel) -> bool:
    import torch

    from models.maths.transitions import Grid

    grid = Grid(*(torch.tensor([level]) for level in (0.5, 0.4, 0.9)))
    return kernel.step(torch.zeros(1, 1), torch.zeros(1, 1), grid).normalized
