"""Flow-GRPO (arXiv 2505.05470): the clipped policy ratio of stored stochastic steps, with group advantages.

One update per epoch is the on-policy case: every ratio is exactly 1 and the loss is plain policy gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from models.sampling import replay
from tasks.algorithms.base import Batch, Models, Requirements, RowLoss
from tasks.algorithms.objectives import clipped_surrogate, policy_kl, ratio_metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPO:
    """The published objective; ``scripts/train_sd3.py`` of the public code."""

    clip_range: float = 1e-4
    """Ratios are clipped to 1 +- clip_range; log-probs are means over dims, so this is small."""
    kl_coef: float = 0.0
    """Weight of the KL to the base model."""
    kl: Literal["gaussian", "flow_grpo", "velocity"] = "gaussian"
    """Scale of that KL, see ``objectives.policy_kl``."""

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            ValueError: one cannot work.
        """
        if not 0 < self.clip_range < 1:
            raise ValueError(f"clip_range is {self.clip_range}; it must lie between 0 and 1.")
        if self.kl_coef < 0:
            raise ValueError(f"kl_coef is {self.kl_coef}; it must not be negative.")
        if self.kl not in ("gaussian", "flow_grpo", "velocity"):
            raise ValueError(f"kl is {self.kl!r}; it must be 'gaussian', 'flow_grpo' or 'velocity'.")

    @property
    def requires(self) -> Requirements:
        """Log-probs, groups of two, and the base model for a KL."""
        with_kl = self.kl_coef > 0
        return Requirements(log_probs=True, min_group_size=2, reference=with_kl, zero_advantages=with_kl)

    def loss(self, batch: Batch, models: Models) -> RowLoss:
        """Return the clipped loss plus kl_coef times the KL, per row."""
        velocity = models.velocity(batch)
        step, log_probs = replay(models.kernel, batch.latents, velocity, batch.next_latents, batch.grid)
        log_ratio = log_probs - batch.old_log_probs
        ratio = torch.exp(log_ratio)
        loss = clipped_surrogate(ratio, batch.advantages, self.clip_range)
        metrics = ratio_metrics(ratio.detach(), log_ratio.detach(), self.clip_range)
        if self.kl_coef > 0:
            reference = models.reference_velocity(batch)
            scale = (batch.grid.sigma - batch.grid.sigma_next).abs()
            kl = policy_kl(self.kl, step, models.step(batch, reference), (velocity, reference), scale)
            loss = loss + self.kl_coef * kl
            metrics["kl"] = kl.detach()
        return RowLoss(loss=loss, metrics=metrics)
