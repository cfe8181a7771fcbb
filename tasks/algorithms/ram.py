"""RAM, reinforce adjoint matching (arXiv 2605.10759): regression on the base model's velocity, moved by the advantage.

The loss mean (v - sg(v_base + m A ((eps - x0) - v_old)))^2 has one optimum: the base model plus m times the behavior
policy's error, weighted by the advantage. Samples with A > 0 attract the velocity, those with A < 0 repel it, and those
of advantage 0 pull it to the base model, so all samples are trained. 1 / m is the weight of a KL to the base model;
there is no ratio and no clip. At v = v_old = v_base the gradient is m times that of AWM.

Noisy levels are drawn more often, and the rollout policy follows the trained one slowly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import PositiveFloat

from flowmill.models.maths.transitions import expand
from flowmill.tasks.algorithms.base import ForwardTimes, Requirements, RowLoss, expect
from flowmill.tasks.algorithms.diffusion import DiffusionBatch, DiffusionModels, ForwardBatch
from flowmill.tasks.algorithms.forward import Decay, ForwardProcess, decay_of
from flowmill.tasks.algorithms.objectives import squared_error


@dataclass(frozen=True, slots=True, kw_only=True)
class RAM(ForwardProcess):
    """``scripts/training_sd3.py`` of the public code, according to two other trainers; velocities have no guidance."""

    times: Mapping[str, Any] = field(default_factory=dict)
    """Noise levels, see ``base.ForwardTimes``; the defaults here are kind 'power' and count 8."""
    multiplier: PositiveFloat = 100.0
    """m: 100 for rewards like GenEval and OCR, 1000 for PickScore. Gradients scale with it: if their norm is clipped,
    only the pull to the base model changes."""
    decay: Decay = field(default_factory=lambda: {"rate": 0.01, "maximum": 0.9})
    """Decay of the behavior policy, see ``base.BehaviorDecay``: flat, rate, maximum, start."""

    def levels(self, **forced: Any) -> ForwardTimes:
        """Return the noise levels, with the published ones as default."""
        return ForwardProcess.levels(self, **{"kind": "power", "count": 8, **self.times, **forced})

    @property
    def requires(self) -> Requirements:
        """Requires forward data of all samples, the base model and the behavior policy."""
        return self.needs(
            levels=self.levels(), behavior=True, reference=True, zero_advantages=True, decay=decay_of(self.decay)
        )

    def loss(self, batch: DiffusionBatch, models: DiffusionModels) -> RowLoss:
        """Return the squared distance to the target velocity, plus a KL if set."""
        rows = expect(batch, ForwardBatch)
        velocity = models.velocity(rows)
        behavior, base = models.behavior_velocity(rows, velocity), models.reference_velocity(rows)
        residual = rows.target - behavior
        target = base + expand(self.multiplier * rows.advantages, residual) * residual
        metrics = {
            "base_distance": squared_error(velocity.detach(), base),
            "error": squared_error(velocity.detach(), rows.target),
        }
        loss = squared_error(velocity, target)
        return RowLoss(loss=self.add_kl(rows, models, velocity, loss, metrics), metrics=metrics)
