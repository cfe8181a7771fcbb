"""DiffusionNFT (arXiv 2509.16117): contrasts an implicit better and worse policy on noised final latents.

Samples with a high advantage pull the velocity towards them, samples with a low one pull the mirrored velocity.
Rollouts use any solver, no guidance, and a policy that follows the trained one by ``decay``.

A sample of advantage 0 weights both sides equally, so it only pulls back to the behavior policy. Such samples are
skipped without a KL; with a KL all samples are trained, as in the public code.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import PositiveFloat

from flowmill.tasks.algorithms.base import Requirements, RowLoss, expect
from flowmill.tasks.algorithms.diffusion import DiffusionBatch, DiffusionModels, ForwardBatch
from flowmill.tasks.algorithms.forward import Decay, ForwardProcess, decay_of
from flowmill.tasks.algorithms.objectives import nft_loss, preference


@dataclass(frozen=True, slots=True, kw_only=True)
class NFT(ForwardProcess):
    """``scripts/train_nft_sd3.py`` of the public code."""

    beta: PositiveFloat = 1.0
    """Distance of the implicit policies from the behavior policy; 1 or 0.1 in the public configs."""
    scale: PositiveFloat = 5.0
    """Advantages of +-scale are the strongest preference, and the loss is multiplied by it."""
    decay: Decay = field(default_factory=dict)
    """Decay of the behavior policy, see ``base.BehaviorDecay``: flat, rate, maximum, start."""

    @property
    def requires(self) -> Requirements:
        """Requires forward data and the behavior policy; a KL also the base model and samples of advantage 0."""
        return self.needs(levels=self.levels(), behavior=True, decay=decay_of(self.decay))

    def loss(self, batch: DiffusionBatch, models: DiffusionModels) -> RowLoss:
        """Return scale times the contrastive loss, plus the KL."""
        rows = expect(batch, ForwardBatch)
        velocity = models.velocity(rows)
        behavior = models.behavior_velocity(rows, velocity)
        weight = preference(rows.advantages, self.scale)
        state = (rows.latents, rows.clean, rows.grid.sigma)
        loss = self.scale * nft_loss(velocity, behavior, state, weight, self.beta).to(velocity.dtype)
        metrics = {"preference": weight, "behavior_distance": (velocity - behavior).detach().abs().flatten(1).mean(1)}
        return RowLoss(loss=self.add_kl(rows, models, velocity, loss, metrics), metrics=metrics)
