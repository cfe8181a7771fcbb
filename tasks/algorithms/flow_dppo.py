"""Flow-DPPO (arXiv 2606.11025): policy gradient without ratio clipping, masked where the policy diverged.

A row is masked if the KL of its step to the behavior step is at least ``threshold`` and the row would push the step
further away: A > 0 with a ratio above 1, or A < 0 with a ratio below 1. At the behavior policy no row is masked, and
the loss is Flow-GRPO's. Rows of advantage 0 contribute only to the KL, and are left out without one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import PositiveFloat

from flowmill.models.maths.sampling import replay
from flowmill.models.maths.transitions import Gaussian, gaussian_kl
from flowmill.tasks.algorithms.base import Requirements, RowLoss, expect
from flowmill.tasks.algorithms.diffusion import DiffusionBatch, DiffusionModels, TransitionBatch
from flowmill.tasks.algorithms.grpo import KL
from flowmill.tasks.algorithms.objectives import divergence_mask, ratio_metrics
from flowmill.tasks.algorithms.ratios import policy_ratio

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowDPPO(KL):
    """Divergence mask."""

    threshold: PositiveFloat = 1e-5
    """KL beyond which rows that push further are masked."""

    @property
    def gap_limit(self) -> tuple[str, float]:
        """The threshold."""
        return "the threshold", self.threshold

    @property
    def kl_limit(self) -> float:
        """A hundred thresholds, as the KL of log-ratios grows with their square."""
        return 100 * self.threshold

    @property
    def requires(self) -> Requirements:
        """Those of Flow-GRPO, and the behavior policy's means."""
        return self.kl_needs(old_means=True)

    def loss(self, batch: DiffusionBatch, models: DiffusionModels) -> RowLoss:
        """Return the masked loss."""
        rows = expect(batch, TransitionBatch)
        velocity = models.velocity(rows)
        step, log_probs = replay(models.kernel, rows.latents, velocity, rows.next_latents, rows.grid)
        gap, rows = self._divergence(rows, step), rows.anchored(step, log_probs)
        log_ratio = log_probs - rows.old_log_probs
        ratio = policy_ratio(log_ratio)
        divergence = self._divergence(rows, step)
        mask = divergence_mask(ratio.detach(), rows.advantages, divergence, self.threshold)
        metrics = ratio_metrics(log_ratio.detach(), (math.inf, math.inf))
        metrics |= {"divergence": divergence, "kl_epoch": divergence, "masked": 1 - mask, "gap": gap}
        loss = self.add_kl(rows, models, velocity, -rows.advantages * ratio * mask, metrics)
        return RowLoss(loss=loss, metrics=metrics)

    def _divergence(self, rows: TransitionBatch, step: Gaussian) -> Tensor:
        if rows.old_means is None:
            raise TypeError("Flow-DPPO needs the behavior policy's means")
        return gaussian_kl(step, Gaussian(rows.old_means, step.std)).detach()
