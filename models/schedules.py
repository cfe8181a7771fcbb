"""Rollout plans: which denoising steps are stochastic, and which of those are trained. Pure.

A plan is drawn per group from the group's own seed, never per rank, so all samples of a group share it. A new plan is
a frozen dataclass with ``draw`` and one line in the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

PLANS = {
    "all": "models.schedules:AllSteps",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The plan of one group over a schedule of T steps."""

    stochastic: tuple[int, ...]
    """Steps taken with the stochastic kernel; the others are ODE steps."""
    trained: tuple[int, ...]
    """Stochastic steps that are stored for training."""

    @property
    def states(self) -> tuple[int, ...]:
        """Steps whose latents must be stored: every trained step and its successor."""
        return tuple(sorted({state for step in self.trained for state in (step, step + 1)}))


class Plan(Protocol):
    """Chooses steps for a group."""

    def draw(self, steps: int, seed: int) -> Steps:
        """Return the steps of one group; equal seeds give equal steps."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AllSteps:
    """Every step but the last is stochastic and trained.

    The last step has almost no noise, so its likelihood overflows; no public trainer trains it. ``last`` says what it
    is instead: 'ode', 'sde' (stochastic, not trained: Flow-GRPO) or 'train'.
    """

    last: Literal["ode", "sde", "train"] = "ode"

    def __post_init__(self) -> None:
        """Check the option.

        Raises:
            ValueError: ``last`` is unknown.
        """
        if self.last not in ("ode", "sde", "train"):
            raise ValueError(f"last is {self.last!r}; it must be 'ode', 'sde' or 'train'.")

    def draw(self, steps: int, seed: int) -> Steps:
        """Return the same steps for every group; the seed is not used."""
        body, every = tuple(range(steps - 1)), tuple(range(steps))
        return Steps(
            stochastic=body if self.last == "ode" else every,
            trained=every if self.last == "train" else body,
        )
