"""Refuses settings of advantages and replay that have no effect, or another effect than they name. Pure.

There is one list of rules per config section; ``flowmill.tasks.checks.check`` applies them before any work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowmill.configs.advantages import ReplaySection
from flowmill.configs.refusals import Rule, refuse
from flowmill.configs.schema import RunConfig
from flowmill.configs.suggestions import did_you_mean

if TYPE_CHECKING:
    from flowmill.models.maths.transitions import Kernel
    from flowmill.tasks.algorithms.base import Requirements

ADVANTAGE: tuple[Rule[RunConfig], ...] = (
    Rule("advantage.std", lambda c, std: c.advantage.aggregation == "gdpo" and std != "group",
         "advantage.aggregation 'gdpo' divides every reward by the std of its group and their sum by that of the "
         "epoch, as Flow-Factory does for either value of global_std",
         "Set advantage.std to 'group', or the aggregation to 'sum'"),
    Rule("advantage.min_count", lambda c, count: c.advantage.std == "running" and count > c.advantage.buffer,
         "no prompt would ever have enough rewards for its own statistics",
         "Lower min_count to buffer or less", where="{setting} is {value} and advantage.buffer {advantage.buffer}, so"),
    Rule("advantage.mean", lambda c, mean: mean == "leave_one_out" and c.advantage.std != "none",
         "advantage.std is '{advantage.std}', so the leave-one-out mean would only change the scale",
         "Set advantage.std to 'none', or mean to 'group'"),
    Rule("advantage.mean", lambda c, mean: mean == "global" and c.advantage.std != "global",
         "advantage.std is '{advantage.std}': rewards centered on the mean of all samples need the std of all samples",
         "Set advantage.std to 'global', or mean to 'group'"),
    Rule("advantage.informative", lambda c, count: count > c.rollout.prompts_per_epoch,
         "an epoch has rollout.prompts_per_epoch {rollout.prompts_per_epoch} groups",
         "Raise it, best to twice that or more, or lower advantage.informative"),
    Rule("advantage.informative", lambda c, _: c.rollout.group_size == 1,
         "rollout.group_size is 1, and one reward equals itself",
         "Raise group_size, or remove advantage.informative"),
    Rule("advantage.diversity", lambda c, label: did_you_mean(label, _monitors(c)) if label not in _monitors(c) else "",
         "no monitor has this name",
         "{found} Add one to monitors, {{name: diversity, options: {{to: nearest}}}} for instance, or remove "
         "advantage.diversity"),
    Rule("advantage.kl_gate", lambda c, _: c.advantage.kl_coef == 0,
         "advantage.kl_coef is 0, so there is nothing to gate",
         "Set it, or remove advantage.kl_gate"),
    Rule("advantage.kl_gate", lambda c, _: set(_monitors(c)) <= {c.advantage.diversity},
         "there are no monitors to doubt a reward by, so there is nothing to gate",
         "Set it, or remove advantage.kl_gate"),
    Rule("advantage.group_mean_min",
         lambda c, low: c.advantage.group_mean_max is not None and low > c.advantage.group_mean_max,
         "no group could be trained on",
         "Swap them", where="{setting} is {value} and advantage.group_mean_max {advantage.group_mean_max}, so"),
)  # fmt: skip


def _monitors(config: RunConfig) -> list[str]:
    return [monitor.slot for monitor in config.monitors]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A config and the requirements of its algorithm."""

    config: RunConfig
    requires: Requirements

    @property
    def algorithm(self) -> str:
        """The algorithm with its config key, for messages."""
        return f"optimize.algorithm '{self.config.optimize.algorithm.name}'"

    @property
    def group(self) -> int:
        """Number of samples that are compared."""
        return self.config.samples_per_group


#: The rows that an algorithm compares fit in a micro-batch.
UNITS: tuple[Rule[Trained], ...] = (
    Rule("execution.micro_batch_size", lambda f, size: f.requires.unit == "pair" and size < 2,
         "{setting} is {value}",
         "Set {setting} to 2 or more",
         where="{facts.algorithm} compares a group's best and worst sample in one forward, but"),
    Rule("execution.micro_batch_size",
         lambda f, size: f.requires.unit == "group" and size < f.group and
         "rollout.group_size" + " times the plan's branches" * (f.group // f.config.rollout.group_size > 1),
         "{setting} is {value}",
         "Set {setting} to {facts.group} or more",
         where="{facts.algorithm} compares whole groups in one forward, here of {facts.group} samples ({found}), but"),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed(Trained):
    """A config with ``optimize.replay``, and the stochastic step of its rollouts."""

    replay: ReplaySection
    kernel: Kernel | None


REPLAY: tuple[Rule[Replayed], ...] = (
    Rule("optimize.replay.steps", lambda f, _: f.requires.data == "forward",
         "{facts.algorithm} noises final latents again and trains no steps",
         "Remove optimize.replay.steps"),
    Rule("optimize.replay.steps", lambda f, steps: steps >= f.config.rollout.steps,
         "rollout.steps is {rollout.steps}, so no step would be left out",
         "Lower it, or remove optimize.replay.steps"),
    Rule("optimize.replay.weight",
         lambda f, weight: weight == "density" and f.kernel is not None and not _has_densities(f.kernel),
         "the log-probs of rollout.sampler '{rollout.sampler.name}' are squared distances, no densities",
         "Set its log_prob to 'gaussian', or the weight to 'tempered'"),
)  # fmt: skip


def check_advantage(config: RunConfig) -> None:
    """Check that every setting of ``advantage`` has the effect it names."""
    refuse(ADVANTAGE, config)


def check_replay(config: RunConfig, requires: Requirements, kernel: Kernel | None) -> None:
    """Check that every setting of ``optimize.replay`` has the effect it names.

    Args:
        config: the config.
        requires: requirements of its algorithm.
        kernel: the stochastic step of its rollouts; None if every step has a density.
    """
    replay = config.optimize.replay
    if replay is not None:
        refuse(REPLAY, Replayed(config=config, requires=requires, replay=replay, kernel=kernel))


def _has_densities(kernel: Kernel) -> bool:
    import torch

    from flowmill.models.maths.transitions import Grid

    grid = Grid(*(torch.tensor([level]) for level in (0.5, 0.4, 0.9)))
    return kernel.step(torch.zeros(1, 1), torch.zeros(1, 1), grid).normalized
