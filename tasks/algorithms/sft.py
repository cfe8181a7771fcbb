"""Supervised fine-tuning: the denoising error of samples at fresh noise, without rewards.

Rejected samples, and rated ones below the neutral rating, are left out. ``times`` chooses the noise levels:
'stratified' (uniform), 'logit_normal' (Stable Diffusion 3, arXiv 2403.03206), 'timesteps' (those of Stable Diffusion's
training), or 'grid', the levels of the family's own schedule with its shift.
"""

from __future__ import annotations

from dataclasses import dataclass

from flowmill.tasks.algorithms.base import Requirements, RowLoss, expect
from flowmill.tasks.algorithms.diffusion import DiffusionBatch, DiffusionModels, ForwardBatch
from flowmill.tasks.algorithms.forward import ForwardProcess, Prediction, errors


@dataclass(frozen=True, slots=True, kw_only=True)
class SFT(ForwardProcess):
    """Flow matching (arXiv 2210.02747, eq. 23), or the error of another prediction type."""

    guided: bool = False
    """Velocities use the guidance of rollouts; false, as usual in fine-tuning: conditional velocities."""
    prediction: Prediction = "velocity"
    """The prediction whose squared error is the loss."""

    @property
    def requires(self) -> Requirements:
        """Requires forward data of single samples."""
        return self.needs(levels=self.levels(), min_group_size=1, advantages=False, desired=True)

    def loss(self, batch: DiffusionBatch, models: DiffusionModels) -> RowLoss:
        """Return the weighted error of each row, plus the KL."""
        rows = expect(batch, ForwardBatch)
        velocity = models.velocity(rows)
        error = errors(rows, velocity, prediction=self.prediction)[0]
        metrics = {"error": error.detach()}
        return RowLoss(loss=self.add_kl(rows, models, velocity, error, metrics), metrics=metrics)
