"""GRPO-Guard (arXiv 2510.22319): Flow-GRPO with a bias-corrected log-ratio, scaled to the step's noise.

The bias is per sample and the scale per row, so micro-batches may mix timesteps. ``divide_by_dt`` divides the loss by
|dt| as Flow-GRPO's script does; Flow-Factory's does not, so their clip ranges differ (2e-6 and 1e-4).

Signs and rows of advantage 0 are as in Flow-GRPO. The guarded log-ratio has mean 0 over the rollout's noise, also with
``reduce: sum``, where log-ratio and bias are both sums. At the behavior policy it is exactly 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowmill.configs.option_types import OpenShare
from flowmill.models.maths.transitions import Gaussian
from flowmill.tasks.algorithms.base import Requirements, RowLoss
from flowmill.tasks.algorithms.diffusion import DiffusionBatch, DiffusionModels, TransitionBatch
from flowmill.tasks.algorithms.grpo import GRPO
from flowmill.tasks.algorithms.objectives import guarded_log_ratio

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPOGuard(GRPO):
    """Bias-free ratio."""

    clip_range: OpenShare = 2e-6
    """Ratios are clipped to 1 +- clip_range."""
    divide_by_dt: bool = True
    """Divide the loss by |dt|."""

    @property
    def requires(self) -> Requirements:
        """Those of Flow-GRPO, and the behavior policy's means."""
        return self.kl_needs(old_means=True, densities=True)

    def loss(self, batch: DiffusionBatch, models: DiffusionModels) -> RowLoss:
        """Return the clipped loss of the guarded ratio."""
        return self.ratio_loss(batch, models, self._guard)

    def _guard(self, rows: TransitionBatch, step: Gaussian, log_ratio: Tensor) -> tuple[Tensor, Tensor]:
        if rows.old_means is None:
            raise TypeError("GRPO-Guard needs the behavior policy's means")
        guarded = guarded_log_ratio(log_ratio, step.mean, rows.old_means, step.std, terms=self.terms(rows))
        # max(-A rho, ...) / |dt| is the same loss with A / |dt|.
        dt = rows.grid.sigma - rows.grid.sigma_next
        return guarded, rows.advantages / dt if self.divide_by_dt else rows.advantages
