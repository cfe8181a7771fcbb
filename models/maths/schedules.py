"""Rollout plans: which denoising steps are stochastic, and which of those are trained. Pure.

A plan is drawn per group from the group's own seed, never per rank, so all samples of a group share it; only a
``DrawnPerSample`` is drawn per sample, from its seed. A new plan is a frozen dataclass with ``draw``, and one line in
the table.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol, TypeAlias

from pydantic import AfterValidator, NonNegativeInt, PositiveInt

from flowmill.configs.option_types import PositiveShare


def _distinct(steps: tuple[int, ...]) -> tuple[int, ...]:
    """Refuse a step that is named twice: it would be trained twice as often, or with another probability."""
    repeated = sorted({step for step in steps if steps.count(step) > 1})
    if repeated:
        raise ValueError(f"it holds step {repeated[0]} more than once. Remove it")
    return steps


#: Steps, each named once.
Distinct: TypeAlias = Annotated[tuple[int, ...], AfterValidator(_distinct)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The plan of one group over a schedule of T steps."""

    stochastic: tuple[int, ...]
    """Steps taken with the stochastic kernel; the others are ODE steps."""
    trained: tuple[int, ...]
    """Stochastic steps that are stored for training."""
    kept: tuple[int, ...] = ()
    """Further steps whose latents are stored; T is the final latents."""
    branches: int = 0
    """Stochastic branches that leave an ODE trunk at every trained step; 0: no branching."""

    @property
    def states(self) -> tuple[int, ...]:
        """Steps whose latents must be stored: every trained step, its successor, and the further stored states."""
        return tuple(sorted({state for step in self.trained for state in (step, step + 1)} | set(self.kept)))


class Plan(Protocol):
    """Chooses steps for a group."""

    def draw(self, steps: int, seed: int, epoch: int) -> Steps:
        """Return the steps of one group in an epoch (from 1); equal arguments give equal steps."""


class DrawnPerSample:
    """Marks plans that are drawn with the seed of each sample instead of its group's."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AllSteps:
    """Every step but the last is stochastic and trained. The last step has almost no noise, so its likelihood
    overflows; no public trainer trains it. ``last`` sets its kind: 'ode', 'sde' (stochastic, not trained: Flow-GRPO) or
    'train'."""

    last: Literal["ode", "sde", "train"] = "ode"
    """The last step: without noise, with noise, or with noise and trained."""
    keep_final: bool = False
    """Store the final latents too, for algorithms that compare them."""

    def draw(self, steps: int, seed: int, epoch: int) -> Steps:
        """Return the same steps for every group."""
        body, every = tuple(range(steps - 1)), tuple(range(steps))
        return Steps(
            stochastic=body if self.last == "ode" else every,
            trained=every if self.last == "train" else body,
            kept=(steps,) if self.keep_final else (),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """``size`` consecutive stochastic, trained steps within [low, high); all others are ODE steps.

    ``random`` draws the start per group (Flow-GRPO-Fast draws it per rank, which mixes windows within a group);
    ``fixed`` starts at ``low``; ``progressive`` slides by ``stride`` every ``epochs_per_shift`` epochs and starts again
    at ``low`` after the last position (MixGRPO, arXiv 2507.21802).
    """

    size: PositiveInt = 2
    """Steps of the window."""
    low: NonNegativeInt = 0
    """First possible step of the window."""
    high: int | None = None
    """End of the range of steps, exclusive; all but the last step of the schedule when absent."""
    mode: Literal["random", "fixed", "progressive"] = "random"
    """Start drawn per group, always at ``low``, or moving with the epochs."""
    stride: PositiveInt = 1
    """Steps by which a progressive window moves at a time."""
    epochs_per_shift: PositiveInt = 1
    """Epochs a progressive window stays."""

    def without_effect(self, steps: int) -> str | None:
        """Return why the stride of a moving window does nothing, if so."""
        starts = len(self._starts(steps))
        stays = self.mode == "progressive" and self.stride >= max(2, starts)
        reason = f"stride is {self.stride}, and its range has only {starts} starts of a window, so it never moves"
        return reason if stays else None

    def switched_off(self) -> str | None:
        """Return why options of a moving window do nothing, if so."""
        idle = self.mode != "progressive" and (self.stride, self.epochs_per_shift) != (1, 1)
        reason = f"stride and epochs_per_shift act with mode 'progressive', and mode is {self.mode!r}"
        return reason if idle else None

    def draw(self, steps: int, seed: int, epoch: int) -> Steps:
        """Return the window of a group; without ``high`` the last step is never in it. Raises ValueError if the window
        does not fit into the schedule."""
        starts = self._starts(steps)
        high = starts.stop + self.size - 1
        if not starts or high > steps:
            raise ValueError(
                f"a window of {self.size} steps does not fit into [{self.low}, {high}) of rollout.steps {steps}. "
                "Lower size or low, or raise rollout.steps."
            )
        if self.mode == "fixed":
            start = starts[0]
        elif self.mode == "random":
            start = random.Random(seed).choice(starts)
        else:
            places = starts[:: self.stride]
            start = places[self._shifts(epoch) % len(places)]
        chosen = tuple(range(start, start + self.size))
        return Steps(stochastic=chosen, trained=chosen)

    def moved(self, steps: int, epoch: int) -> bool:
        """Return whether the window of an epoch lies elsewhere than in earlier versions, which did not start again at
        ``low`` where ``stride`` does not divide the range."""
        starts, shifts = self._starts(steps), self._shifts(epoch)
        if self.mode != "progressive" or not starts:
            return False
        places = starts[:: self.stride]
        return places[shifts % len(places)] != starts[shifts * self.stride % len(starts)]

    def _starts(self, steps: int) -> range:
        high = steps - 1 if self.high is None else self.high
        return range(self.low, high - self.size + 1)

    def _shifts(self, epoch: int) -> int:
        return (epoch - 1) // self.epochs_per_shift


@dataclass(frozen=True, slots=True, kw_only=True)
class Subset:
    """``count`` stochastic, trained steps drawn per group from ``candidates`` (Flow-Factory's ``sde_steps``)."""

    count: PositiveInt = 1
    """Steps that are drawn."""
    candidates: Distinct | None = None
    """Steps they are drawn from; all but the last when absent."""

    def draw(self, steps: int, seed: int, epoch: int) -> Steps:
        """Return the subset of a group; without candidates, of all steps but the last. Raises ValueError if there are
        fewer candidates than steps to draw, or one lies outside the schedule."""
        candidates = list(range(steps - 1)) if self.candidates is None else sorted(self.candidates)
        if not 1 <= self.count <= len(candidates) or not all(0 <= step < steps for step in candidates):
            raise ValueError(
                f"{self.count} of the steps {candidates} cannot be drawn from a schedule of rollout.steps {steps}."
            )
        chosen = tuple(sorted(random.Random(seed).sample(candidates, self.count)))
        return Steps(stochastic=chosen, trained=chosen)


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomFraction(DrawnPerSample):
    """Every step but the last is stochastic; a random part of them is stored and trained.

    DanceGRPO (arXiv 2505.07818; public code ``train_grpo_flux.py``: the last step is dropped, the others permuted per
    sample, the first ``int(timestep_fraction * count)`` trained). Only trained steps are stored. ``last`` is the
    kind of the last step: 'ode', or 'sde' (stochastic, never trained).
    """

    fraction: PositiveShare = 0.6
    """Share of the stochastic steps that is stored and trained, in (0, 1]."""
    last: Literal["ode", "sde"] = "ode"
    """The last step: without noise, or with noise; it is never trained."""

    def draw(self, steps: int, seed: int, epoch: int) -> Steps:
        """Return the steps of one sample; every sample has int(fraction * (steps - 1)) of them. Raises ValueError if
        that is 0."""
        # Rounded as in the public code: 0.29 * 100 is 28.999999999999996, hence 28.
        count = int(self.fraction * (steps - 1))
        if count < 1:
            raise ValueError(
                f"fraction {self.fraction} of the {steps - 1} steps before the last of rollout.steps {steps} is none. "
                "Raise one of them."
            )
        chosen = tuple(sorted(random.Random(seed).sample(range(steps - 1), count)))
        return Steps(stochastic=tuple(range(steps if self.last == "sde" else steps - 1)), trained=chosen)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalOnly:
    """No stochastic step; only the final latents are stored, for forward-process algorithms (NFT, AWM, DPO ...)."""

    def draw(self, steps: int, seed: int, epoch: int) -> Steps:
        """Return the plan that keeps state T."""
        return Steps(stochastic=(), trained=(), kept=(steps,))


@dataclass(frozen=True, slots=True, kw_only=True)
class LateStates(DrawnPerSample):
    """No stochastic step; ``count`` states, drawn per sample from [low, high), are stored as starts for ``refl``. State
    i is the start of step i. ReFL (arXiv 2304.05977) has 1 of the states 30 to 39 of 40."""

    count: PositiveInt = 1
    """States of each sample."""
    low: NonNegativeInt | None = None
    """First possible state; that of the last quarter of the steps when absent."""
    high: int | None = None
    """End of the range of states; ``rollout.steps`` when absent, so that the last is the start of the last step."""

    def draw(self, steps: int, seed: int, epoch: int) -> Steps:
        """Return the states of one sample; raise ValueError if the range has fewer than ``count``."""
        low = steps - max(1, steps // 4) if self.low is None else self.low
        high = steps if self.high is None else self.high
        if high > steps or high - low < self.count:
            raise ValueError(
                f"{self.count} states cannot be drawn from [{low}, {high}) of rollout.steps {steps}. Lower count or "
                "low, or raise rollout.steps."
            )
        chosen = random.Random(seed).sample(range(low, high), self.count)
        return Steps(stochastic=(), trained=(), kept=tuple(sorted(chosen)))


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchEveryStep:
    """``branches`` stochastic branches leave an ODE trunk at every step but the last, each finished by the ODE.
    TempFlow-GRPO: rewards and groups are per (prompt, step), of rollout.group_size trunks times ``branches``."""

    branches: PositiveInt = 4
    """Branches that leave the trunk at every step."""
    steps: Distinct | None = None
    """Steps that branch; all but the last when absent."""

    def per_trunk(self, steps: int) -> int:
        """Return the number of branches of a trunk."""
        return self.branches * (steps - 1 if self.steps is None else len(self.steps))

    def draw(self, steps: int, seed: int, epoch: int) -> Steps:
        """Return the branching steps, the same for every group; raise ValueError if a step lies outside the
        schedule."""
        chosen = tuple(range(steps - 1)) if self.steps is None else tuple(sorted(self.steps))
        if not chosen or not all(0 <= step < steps for step in chosen):
            raise ValueError(f"steps {list(chosen)} are not steps of a schedule of rollout.steps {steps}.")
        return Steps(stochastic=chosen, trained=chosen, branches=self.branches)
