"""Diffusion-KTO (arXiv 2404.04465) on single samples that are desired or not, at fresh noise.

The gain of a sample is beta / 2 times the fall of its denoising error from the base model to the policy. The loss of a
desired sample falls as its gain grows, that of an undesired one as it falls; both level off, so clear cases count less.
The reference point is 0, as in APO-zero (arXiv 2408.06266), so that the loss of a row does not depend on its batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import PositiveFloat

from tasks.algorithms.base import Requirements, RowLoss, expect
from tasks.algorithms.diffusion import DiffusionBatch, DiffusionModels, ForwardBatch
from tasks.algorithms.forward import ForwardProcess, Prediction, errors
from tasks.algorithms.objectives import kto_loss


@dataclass(frozen=True, slots=True, kw_only=True)
class KTO(ForwardProcess):
    """Needs no pairs: a rating of each sample is enough."""

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
        """Requires forward data and the base model."""
        return self.needs(levels=self.levels(), min_group_size=1, reference=True)

    def loss(self, batch: DiffusionBatch, models: DiffusionModels) -> RowLoss:
        """Return the loss of each row, plus the KL."""
        rows = expect(batch, ForwardBatch)
        velocity = models.velocity(rows)
        error, reference = errors(rows, velocity, models.reference_velocity(rows), prediction=self.prediction)
        gain = 0.5 * self.beta * (reference - error)
        loss = kto_loss(gain, rows.advantages, self.desired_weight, self.undesired_weight)
        metrics = {"gain": gain.detach(), "preferred": (gain * rows.advantages > 0).float()}
        return RowLoss(loss=self.add_kl(rows, models, velocity, loss, metrics), metrics=metrics)
