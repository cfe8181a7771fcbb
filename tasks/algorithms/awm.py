"""AWM, advantage-weighted matching (arXiv 2509.25050): the clipped policy ratio of a forward-process pseudo log-prob.

The log-prob is minus the flow-matching error at the same level and noise, weighted in one of six ways. Training lowers
the error of rows with A > 0 and raises it for A < 0. Rows of advantage 0 contribute only to the KL, and are left out
without one. Before the first update every ratio is exactly 1 and the loss is plain advantage-weighted matching.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from pydantic import PositiveFloat

from flowmill.tasks.algorithms.base import Requirements, RowLoss, expect
from flowmill.tasks.algorithms.diffusion import DiffusionBatch, DiffusionModels, ForwardBatch
from flowmill.tasks.algorithms.forward import Decay, ForwardProcess, decay_of
from flowmill.tasks.algorithms.objectives import (
    adaptive_error,
    awm_log_prob,
    ratio_metrics,
    ratio_surrogate,
    squared_error,
)
from flowmill.tasks.algorithms.ratios import RatioClip

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AWM(ForwardProcess, RatioClip):
    """Flow-Factory's ``trainers/awm.py``."""

    clip_range: PositiveFloat = 1.0
    """Ratios are clipped to 1 +- clip_range."""
    surrogate: Literal["clip", "spo"] = "clip"
    """PPO's loss, with no gradient for ratios beyond the clip range, or SPO's, which pulls them back."""
    weighting: Literal["uniform", "t", "t2", "huber", "ghuber", "adaptive"] = "uniform"
    """Weighting of the error by time, see ``objectives.awm_log_prob``; 'adaptive' also by its own size, see
    ``objectives.adaptive_error``."""
    power: PositiveFloat = 0.25
    """Exponent of 'ghuber'."""
    decay: Decay = field(default_factory=dict)
    """Decay of the behavior policy, see ``base.BehaviorDecay``: flat, rate, maximum, start. The behavior policy makes
    the rollouts, like Flow-Factory's EMA with ``off_policy``; without a decay the policy itself does."""

    def switched_off(self) -> str | None:
        """Return why the exponent does nothing, if so."""
        idle = self.power != 0.25 and self.weighting != "ghuber"
        return f"power belongs to weighting 'ghuber', and weighting is {self.weighting!r}" if idle else None

    @property
    def requires(self) -> Requirements:
        """Requires forward data and the behavior policy; a KL also the base model and samples of advantage 0."""
        return self.needs(levels=self.levels(), behavior=True, decay=decay_of(self.decay), approx_kl=True)

    def loss(self, batch: DiffusionBatch, models: DiffusionModels) -> RowLoss:
        """Return the clipped loss, plus the KL."""
        rows = expect(batch, ForwardBatch)
        velocity = models.velocity(rows)
        behavior = models.behavior_velocity(rows, velocity)
        new, old = (self._score(rows, each).to(velocity.dtype) for each in (velocity, behavior))
        log_ratio = new - old
        metrics = ratio_metrics(log_ratio.detach(), self.clip)
        metrics["error"] = squared_error(velocity.detach(), rows.target)
        loss = ratio_surrogate(self.surrogate, log_ratio, rows.advantages, self.clip)
        return RowLoss(loss=self.add_kl(rows, models, velocity, loss, metrics), metrics=metrics)

    def _score(self, rows: ForwardBatch, velocity: Tensor) -> Tensor:
        if self.weighting == "adaptive":
            return -adaptive_error(velocity, (rows.latents, rows.clean, rows.grid.sigma))
        return awm_log_prob(squared_error(velocity, rows.target), rows.grid.sigma, self.weighting, self.power)
