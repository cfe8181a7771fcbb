"""FDFO, finite difference flow optimization (arXiv 2603.12893), derived from its formulas; its code is not free.

Two samples that start from the same noise and differ by little sampling noise give a finite difference of reward and
image: dR = (R - R_mate) / 2, dx = (x0 - x0_mate) / 2. At every step v should move by -u, u = dx / (mean dx^2 + 1e-6),
in proportion to dR. With the log-prob l = -mean (v - v_old + u)^2 the loss is SPO's loss of exp(l - l_old) and dR. At
v_old its gradient is 2 dR u / D: velocities of the better sample move towards its own image and away from its mate's.
Those of the worse sample move the same way, because its dR and dx both have the opposite sign.

With ``advantage.std`` none, as published, dR and ``clip_range`` are in the reward's unit. A group of two is a pair; in
larger groups the best and the worst sample form the pair. Steps need no density; use samplers with little noise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor

from flowmill.models.maths.transitions import expand
from flowmill.tasks.algorithms.base import Requirements, RowLoss, expect
from flowmill.tasks.algorithms.diffusion import DiffusionBatch, DiffusionModels, TransitionBatch
from flowmill.tasks.algorithms.objectives import ratio_metrics, simple_surrogate, squared_error, unit_sum
from flowmill.tasks.algorithms.ratios import RatioClip


@dataclass(frozen=True, slots=True, kw_only=True)
class FDFO(RatioClip):
    """Pairs of samples, all steps of a rollout alike."""

    clip_range: PositiveFloat = 0.03
    """Ratios are pulled back to 1 +- clip_range."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of mean (v - v_base)^2."""

    @property
    def requires(self) -> Requirements:
        """Requires pairs from one initial noise with steps and ends, and the behavior policy; a KL the base model."""
        with_kl = self.kl_coef > 0
        return Requirements(
            unit="pair",
            min_group_size=2,
            finals=True,
            same_noise=True,
            behavior=True,
            reference=with_kl,
            zero_advantages=with_kl,
            approx_kl=True,
        )

    def loss(self, batch: DiffusionBatch, models: DiffusionModels) -> RowLoss:
        """Return SPO's loss of the finite difference, plus the KL."""
        rows = expect(batch, TransitionBatch)
        if rows.finals is None:
            raise TypeError("FDFO needs the samples' final latents")
        velocity = models.velocity(rows)
        moved = velocity - models.behavior_velocity(rows, velocity)
        gain, difference = (_half_difference(values, rows) for values in (rows.advantages, rows.finals))
        direction = difference / expand((difference**2).flatten(1).mean(1) + 1e-6, difference)
        # -mean (v - v*)^2 with v* = v_old - u, written so that it is exactly -mean u^2 at v_old.
        log_ratio = squared_error(direction, torch.zeros_like(direction)) - squared_error(moved, -direction)
        loss = simple_surrogate(log_ratio, gain, self.clip)
        metrics = ratio_metrics(log_ratio.detach(), self.clip)
        if self.kl_coef > 0:
            kl = squared_error(velocity, models.reference_velocity(rows))
            metrics["kl"] = kl.detach()
            loss = loss + self.kl_coef * kl
        return RowLoss(loss=loss, metrics=metrics)


def _half_difference(values: Tensor, rows: TransitionBatch) -> Tensor:
    """Return half the difference between (B,) or (B, ...) values of rows and those of their mates."""
    return values - unit_sum(expand(rows.weights, values) * values, rows.units) / 2
