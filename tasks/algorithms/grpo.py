"""Flow-GRPO (arXiv 2505.05470): the clipped policy ratio of stored stochastic steps, with group advantages.

DanceGRPO (arXiv 2505.07818) is this with the sampler 'dance_sde'. One update per epoch is the on-policy case: every
ratio is exactly 1 and the loss is plain policy gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from models.sampling import replay
from models.transitions import Gaussian
from tasks.algorithms.base import Batch, Models, Requirements, RowLoss, TransitionBatch, expect
from tasks.algorithms.objectives import clipped_surrogate, policy_kl, ratio_metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class KL:
    """A KL to the base model, added to a loss."""

    kl_coef: float = 0.0
    """Weight of the KL to the base model."""
    kl: Literal["gaussian", "flow_grpo", "velocity", "mean"] = "gaussian"
    """Scale of that KL, see ``objectives.policy_kl``."""

    def check_kl(self) -> None:
        """Check the options.

        Raises:
            ValueError: one cannot work.
        """
        if self.kl_coef < 0:
            raise ValueError(f"kl_coef is {self.kl_coef}; it must not be negative.")
        if self.kl not in ("gaussian", "flow_grpo", "velocity", "mean"):
            raise ValueError(f"kl is {self.kl!r}; it must be 'gaussian', 'flow_grpo', 'velocity' or 'mean'.")

    def add_kl(
        self, batch: Batch, models: Models, velocity: Tensor, loss: Tensor, metrics: dict[str, Tensor]
    ) -> Tensor:
        """Return the loss plus kl_coef times the KL, and report the KL."""
        if self.kl_coef == 0:
            return loss
        reference = models.reference_velocity(batch)
        scale = (batch.grid.sigma - batch.grid.sigma_next).abs()
        steps = (models.step(batch, velocity), models.step(batch, reference))
        kl = policy_kl(self.kl, *steps, (velocity, reference), scale)
        metrics["kl"] = kl.detach()
        return loss + self.kl_coef * kl


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPO(KL):
    """The published objective; ``scripts/train_sd3.py`` of the public code."""

    clip_range: float = 1e-4
    """Ratios are clipped to 1 +- clip_range; log-probs are means over dims, so this is small."""

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            ValueError: one cannot work.
        """
        if not 0 < self.clip_range < 1:
            raise ValueError(f"clip_range is {self.clip_range}; it must lie between 0 and 1.")
        self.check_kl()

    @property
    def requires(self) -> Requirements:
        """Log-probs, groups of two, and the base model for a KL."""
        with_kl = self.kl_coef > 0
        return Requirements(min_group_size=2, reference=with_kl, zero_advantages=with_kl)

    def loss(self, batch: Batch, models: Models) -> RowLoss:
        """Return the clipped loss plus kl_coef times the KL, per row."""
        return self.surrogate(batch, models, lambda rows, step, log_ratio: (log_ratio, rows.advantages))

    def surrogate(
        self,
        batch: Batch,
        models: Models,
        adjust: Callable[[TransitionBatch, Gaussian, Tensor], tuple[Tensor, Tensor]],
    ) -> RowLoss:
        """Return the clipped loss of the log-ratio and advantages that ``adjust`` makes of (rows, step, log-ratio)."""
        rows = expect(batch, TransitionBatch)
        velocity = models.velocity(rows)
        step, log_probs = replay(models.kernel, rows.latents, velocity, rows.next_latents, rows.grid)
        log_ratio, advantages = adjust(rows, step, log_probs - rows.old_log_probs)
        ratio = torch.exp(log_ratio)
        loss = clipped_surrogate(ratio, advantages, self.clip_range)
        metrics = ratio_metrics(ratio.detach(), log_ratio.detach(), self.clip_range)
        return RowLoss(loss=self.add_kl(rows, models, velocity, loss, metrics), metrics=metrics)
