"""The parts of a training config that must fit together, and the steps that its plan draws."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flowmill.configs.errors import ConfigError
from flowmill.configs.schema import RunConfig
from flowmill.models.maths.schedules import Plan, Steps
from flowmill.models.maths.transitions import Kernel
from flowmill.tasks.algorithms.checks import Trained

#: Group seeds and epochs whose steps are checked.
_SEEDS, _EPOCHS = 64, 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination(Trained):
    """The parts of a config that must fit together."""

    kernel: Kernel
    """The sampler."""
    draws: tuple[Steps, ...]
    """Distinct plans of groups and epochs; most plans have one."""

    family: Any
    """The class of the policy, a ``flowmill.models.policies.base.Policy``."""

    @property
    def plan(self) -> str:
        """The plan with its config key, for messages."""
        return f"rollout.plan '{self.config.rollout.plan.name}'"

    @property
    def group(self) -> int:
        """Number of samples that are compared: those of one prompt, or the branches of one prompt and step."""
        return self.config.samples_per_group * max(1, self.draws[0].branches)

    @property
    def rollout_groups(self) -> tuple[int, int]:
        """Number of groups of an epoch of rollouts, and of samples of a group: as ``group``."""
        rollout, (first, *_) = self.config.rollout, self.draws
        steps = len(first.trained) if first.branches else 1
        return rollout.prompts_per_epoch * steps, rollout.group_size * max(1, first.branches)

    @property
    def trained(self) -> list[int]:
        """Steps that any group trains."""
        return sorted({step for steps in self.draws for step in steps.trained})

    @property
    def stores_ends(self) -> list[bool]:
        """Whether final latents are stored, by plan."""
        last = self.config.rollout.steps
        # A branch stores only its own step, so each must be the last step.
        return [min(each.trained) + 1 == last if each.branches else last in each.states for each in self.draws]


def draw_plans(config: RunConfig, plan: Plan) -> tuple[Steps, ...]:
    """Return the distinct step plans of groups, over many seeds and the epochs of the run."""
    name, steps = config.rollout.plan.name, config.rollout.steps
    at = [(seed, 1) for seed in range(_SEEDS)] + [(0, epoch + 1) for epoch in range(min(config.run.epochs, _EPOCHS))]
    try:
        draws = tuple(dict.fromkeys(plan.draw(steps, seed, epoch) for seed, epoch in at))
    except ValueError as error:
        raise ConfigError(f"rollout.plan '{name}': {error}") from None
    for drawn in draws:
        if len(set(drawn.trained)) < len(drawn.trained):
            raise ConfigError(
                f"rollout.plan '{name}' trains the steps {list(drawn.trained)}, but a sample passes each step once. "
                "Remove the repeated ones from its options."
            )
    if len({(len(drawn.trained), drawn.branches) for drawn in draws}) > 1:
        raise ConfigError(
            f"rollout.plan '{name}' trains more steps of some groups than of others, but they are sampled in one "
            "batch. Let its 'draw' return equally many steps for every seed."
        )
    return draws
