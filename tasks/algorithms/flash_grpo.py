"""Flash-GRPO (arXiv 2605.15980): one trained step per prompt, and Flow-GRPO's advantages rectified by step.

A is replaced by w / mean(w) A with w = std / |d mean / d v|, so that the gradient of a log-prob with respect to the
velocity has the same length at every step. TempFlow-GRPO, with the std alone as weight, makes noisy steps count more.
The mean is over the trained rows. Signs and rows of advantage 0 are as in Flow-GRPO; if all rows train the same step,
it is Flow-GRPO. The paper draws one step per prompt from the first half: plan ``subset``, ``count`` 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowmill.models.maths.transitions import Gaussian, rectifiers
from flowmill.tasks.algorithms.base import Requirements, RowLoss
from flowmill.tasks.algorithms.diffusion import DiffusionBatch, DiffusionModels, TransitionBatch
from flowmill.tasks.algorithms.grpo import GRPO

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashGRPO(GRPO):
    """Temporal gradient rectification for all samplers and schedules; the public code has the literals of one."""

    @property
    def requires(self) -> Requirements:
        """Those of Flow-GRPO, and log-probs with the scale of the step's noise, which the weight removes."""
        return self.kl_needs(old_means=self.from_means, densities=True)

    def loss(self, batch: DiffusionBatch, models: DiffusionModels) -> RowLoss:
        """Return the clipped loss with rectified advantages."""

        def rectify(rows: TransitionBatch, step: Gaussian, log_ratio: Tensor) -> tuple[Tensor, Tensor]:
            weight = rectifiers(models.kernel, rows.grid) / rows.mean_rectifier
            return log_ratio, rows.advantages * weight

        return self.ratio_loss(batch, models, rectify)
