"""Flow-GRPO (arXiv 2505.05470): the clipped policy ratio of stored stochastic steps, with group advantages.

The loss max(-A rho, -A clip(rho)) raises the log-prob of steps with A > 0 and lowers that of steps with A < 0, until
the ratio leaves the clip range on that side. Rows of advantage 0 contribute only to the KL, and are left out without
one.

DanceGRPO (arXiv 2505.07818) is this with the sampler 'dance_sde'. One update per epoch is the on-policy case: every
ratio is exactly 1 and the loss is plain policy gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import NonNegativeFloat
from torch import Tensor

from flowmill.configs.option_types import OpenShare
from flowmill.models.maths.transitions import Gaussian, gaussian_kl
from flowmill.models.maths.transitions import log_ratio as log_ratio_of_means
from flowmill.tasks.algorithms.base import Requirements, RowLoss, expect
from flowmill.tasks.algorithms.diffusion import DiffusionBatch, DiffusionModels, TransitionBatch
from flowmill.tasks.algorithms.objectives import policy_kl, ratio_metrics, ratio_surrogate
from flowmill.tasks.algorithms.ratios import RatioClip


@dataclass(frozen=True, slots=True, kw_only=True)
class KL:
    """A KL to the base model, added to a loss."""

    kl_coef: NonNegativeFloat = 0.0
    """Weight of the KL to the base model."""
    kl: Literal["gaussian", "flow_grpo", "velocity", "mean"] = "gaussian"
    """Scale of that KL, see ``objectives.policy_kl``."""
    kl_reference: Literal["base", "average"] = "base"
    """Reference of the KL: the base model, or the moving average of the weights."""

    def switched_off(self) -> str | None:
        """Return why options of a KL do nothing, if so."""
        idle = self.kl_coef == 0 and (self.kl, self.kl_reference) != ("gaussian", "base")
        return "kl and kl_reference belong to kl_coef, which is 0" if idle else None

    @property
    def kl_base_limit(self) -> float:
        """Nats per latent value: the mean of a step is then a std of its noise from the base model's."""
        return 0.5

    def kl_needs(self, *, old_means: bool, densities: bool = False) -> Requirements:
        """Return the requirements of a loss on policy ratios with this KL."""
        with_kl, to_base = self.kl_coef > 0, self.kl_reference == "base"
        return Requirements(
            min_group_size=2,
            old_means=old_means,
            densities=densities,
            reference=with_kl and to_base,
            average=with_kl and not to_base,
            zero_advantages=with_kl,
            approx_kl=True,
        )

    def add_kl(
        self, batch: DiffusionBatch, models: DiffusionModels, velocity: Tensor, loss: Tensor, metrics: dict[str, Tensor]
    ) -> Tensor:
        """Return the loss plus kl_coef times the KL, and report the KL."""
        if models.measures:
            base = models.step(batch, models.reference_velocity(batch))
            metrics["kl_base"] = gaussian_kl(models.step(batch, velocity), base)
        if self.kl_coef == 0:
            return loss
        to_base = self.kl_reference == "base"
        reference = models.reference_velocity(batch) if to_base else models.average_velocity(batch)
        steps = (models.step(batch, velocity), models.step(batch, reference))
        kl = policy_kl(self.kl, *steps, (velocity, reference))
        metrics["kl"] = kl.detach()
        return loss + self.kl_coef * kl


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPO(KL, RatioClip):
    """The published objective; ``scripts/train_sd3.py`` of the public code."""

    clip_range: OpenShare = 1e-4
    """Ratios are clipped to 1 +- clip_range; log-probs are means over dims, so this is small."""
    surrogate: Literal["clip", "spo"] = "clip"
    """PPO's loss, with no gradient for ratios beyond the clip range, or SPO's, which pulls them back."""
    reduce: Literal["mean", "sum"] = "mean"
    """Log-probs as means over latent dims (every public trainer), or as sums, which give the ratio of the densities and
    need clip ranges like 0.2."""
    from_means: bool = False
    """Compute the log-ratio from stored means of the behavior policy's steps, see ``transitions.log_ratio``."""

    @property
    def gap_limit(self) -> tuple[str, float]:
        """The distance of the nearer bound."""
        return "the clip range", min(self.clip)

    @property
    def requires(self) -> Requirements:
        """Requires log-probs and groups of two; a KL also the base model, ``from_means`` also stored means."""
        return self.kl_needs(old_means=self.from_means, densities=self.from_means or self.reduce == "sum")

    def loss(self, batch: DiffusionBatch, models: DiffusionModels) -> RowLoss:
        """Return the clipped loss plus kl_coef times the KL, per row."""
        return self.ratio_loss(batch, models, lambda rows, step, log_ratio: (log_ratio, rows.advantages))

    def terms(self, rows: DiffusionBatch) -> int:
        """Return the factor of mean log-ratios: the number of latent dims for sums, else 1."""
        return rows.latents[0].numel() if self.reduce == "sum" else 1

    def ratio_loss(
        self,
        batch: DiffusionBatch,
        models: DiffusionModels,
        adjust: Callable[[TransitionBatch, Gaussian, Tensor], tuple[Tensor, Tensor]],
    ) -> RowLoss:
        """Return the surrogate loss of ``adjust(rows, step, log_ratio)``, a pair of log-ratio and advantages."""
        rows = expect(batch, TransitionBatch)
        velocity = models.velocity(rows)
        step = models.step(rows, velocity)
        log_probs = step.log_prob(rows.next_latents)

        def exponent(rows: TransitionBatch) -> tuple[Tensor, Tensor]:
            difference = log_probs - rows.old_log_probs
            if self.from_means and rows.old_means is not None:
                difference = log_ratio_of_means(step, rows.old_means, rows.next_latents)
            return adjust(rows, step, difference * self.terms(rows))

        with torch.no_grad():
            gap = exponent(rows)[0].abs()
        log_ratio, advantages = exponent(rows.anchored(step, log_probs))
        loss = ratio_surrogate(self.surrogate, log_ratio, advantages, self.clip)
        metrics = ratio_metrics(log_ratio.detach(), self.clip)
        metrics["gap"] = gap
        return RowLoss(loss=self.add_kl(rows, models, velocity, loss, metrics), metrics=metrics)
