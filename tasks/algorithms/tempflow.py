"""TempFlow-GRPO (arXiv 2508.04324): Flow-GRPO with each step's advantage weighted by its noise level.

A is replaced by s sqrt(-dt) / mean(s sqrt(-dt)) A, so noisy, early steps count more and the sign stays. The mean is
over the trained rows, so weights have mean 1 for any steps that a plan draws for each group. If all samples have the
same steps, it is the mean of the schedule, which the public code writes as the literals 2.25, 1.73 and 1.53 for three
schedules. With one trained step it is Flow-GRPO.
"""

from __future__ import annotations

from dataclasses import dataclass

from flowmill.tasks.algorithms.base import RowLoss
from flowmill.tasks.algorithms.diffusion import DiffusionBatch, DiffusionModels
from flowmill.tasks.algorithms.grpo import GRPO


@dataclass(frozen=True, slots=True, kw_only=True)
class TempFlow(GRPO):
    """Noise-level weighting."""

    def loss(self, batch: DiffusionBatch, models: DiffusionModels) -> RowLoss:
        """Return the clipped loss with weighted advantages."""
        return self.ratio_loss(
            batch,
            models,
            lambda rows, step, log_ratio: (log_ratio, rows.advantages * step.std.detach() / rows.mean_std),
        )
