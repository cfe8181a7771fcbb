"""Supervised fine-tuning: the denoising error of samples at fresh noise, without rewards.

Rejected samples, and rated ones below the neutral rating, are left out. ``times`` chooses the noise levels:
'stratified' (uniform), 'logit_normal' (Stable Diffusion 3, arXiv 2403.03206), or 'grid', the levels of the family's own
schedule with its shift; with ``rollout.steps`` 1000 these are the training timesteps of Stable Diffusion.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tasks.algorithms.base import Requirements, RowLoss, expect
from tasks.algorithms.diffusion import DiffusionBatch, DiffusionModels, ForwardBatch
from tasks.algorithms.forward import ForwardProcess
from tasks.algorithms.objectives import prediction_weight, squared_error


@dataclass(frozen=True, slots=True, kw_only=True)
class SFT(ForwardProcess):
    """Flow matching (arXiv 2210.02747, eq. 23), or the error of another prediction type."""

    guided: bool = False
    """Velocities use the guidance of rollouts; false, as usual in fine-tuning: conditional velocities."""
    prediction: Literal["velocity", "epsilon", "v_prediction", "sample"] = "velocity"
    """The prediction whose squared error is the loss: of flow matching, the noise (DDPM, arXiv 2006.11239, eq. 14), v
    of variance-preserving diffusion (arXiv 2202.00512), or the clean latents; see ``objectives.prediction_weight``."""

    @property
    def requires(self) -> Requirements:
        """Requires forward data of single samples."""
        return self.needs(levels=self.levels(), min_group_size=1, advantages=False)

    def loss(self, batch: DiffusionBatch, models: DiffusionModels) -> RowLoss:
        """Return the weighted error of each desired row, plus the KL."""
        rows = expect(batch, ForwardBatch)
        velocity = models.velocity(rows)
        desired = (rows.advantages > 0).to(velocity.dtype)
        error = squared_error(velocity, rows.target) * prediction_weight(self.prediction, rows.grid.sigma) * desired
        metrics = {"error": error.detach()}
        return RowLoss(loss=self.add_kl(rows, models, velocity, error, metrics), metrics=metrics)
