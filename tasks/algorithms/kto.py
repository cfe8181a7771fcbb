"""Diffusion-KTO (arXiv 2404.04465) on single samples that are desired or not, at fresh noise.

The gain of a sample is beta / 2 times the fall of its denoising error from the base model to the policy. The loss of a
desired sample falls as its gain exceeds the reference point, that of an undesired one as it falls below; both level
off, so clear cases count less. The reference point is KTO's (arXiv 2402.01306, eq. 7): the mean gain of an update's
samples under the prompts of others, at least 0, an estimate of the KL from the base model; it has no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pydantic import PositiveFloat

from flowmill.tasks.algorithms.base import Requirements, RowLoss, expect
from flowmill.tasks.algorithms.diffusion import DiffusionBatch, DiffusionModels, ForwardBatch
from flowmill.tasks.algorithms.forward import ForwardProcess, Prediction, errors
from flowmill.tasks.algorithms.objectives import kto_loss

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class KTO(ForwardProcess):
    """Needs no pairs: a rating of each sample is enough."""

    mismatched: ClassVar[bool] = True
    """The reference point is estimated; it is 0 otherwise."""

    beta: PositiveFloat = 2000.0
    """Inverse temperature; errors are means over latent dims, so it is large."""
    prediction: Prediction = "velocity"
    """The prediction whose errors are compared."""
    desired_weight: PositiveFloat = 1.0
    """Weight of desired samples; raise it where they are few."""
    undesired_weight: PositiveFloat = 1.0
    """Weight of undesired samples."""

    @property
    def requires(self) -> Requirements:
        """Requires forward data, the base model, and samples under other prompts for the reference point."""
        return self.needs(levels=self.levels(), min_group_size=1, reference=True, mismatched=self.mismatched)

    def gain(self, batch: DiffusionBatch, models: DiffusionModels, velocity: Tensor) -> Tensor:
        """Return the gain of each row, (B,), from the policy's velocity."""
        rows = expect(batch, ForwardBatch)
        error, reference = errors(rows, velocity, models.reference_velocity(rows), prediction=self.prediction)
        return 0.5 * self.beta * (reference - error)

    def mismatched_gain(self, batch: DiffusionBatch, models: DiffusionModels) -> Tensor:
        """Return the gain of each row under another row's prompt, (B,)."""
        return self.gain(batch, models, models.velocity(batch))

    def loss(self, batch: DiffusionBatch, models: DiffusionModels) -> RowLoss:
        """Return the loss of each row, plus the KL."""
        velocity = models.velocity(batch)
        gain = self.gain(batch, models, velocity)
        weights = (self.desired_weight, self.undesired_weight)
        loss = kto_loss(gain, batch.advantages, *weights, point=models.reference_point)
        metrics = {"gain": gain.detach(), "preferred": (gain * batch.advantages > 0).float()}
        return RowLoss(loss=self.add_kl(batch, models, velocity, loss, metrics), metrics=metrics)
