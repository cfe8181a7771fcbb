"""On-policy distillation: a frozen teacher of the same family replays the states the student visited.

The loss is the true Gaussian KL of student and teacher steps, mean (mu - mu_T)^2 / (2 s^2 |dt|): it falls as the
student moves to the teacher and is 0 there. No reward enters it, so all samples count, whatever their advantage.
"""

from __future__ import annotations

from dataclasses import dataclass

from models.maths.transitions import gaussian_kl
from tasks.algorithms.base import Requirements, RowLoss, expect
from tasks.algorithms.diffusion import DiffusionBatch, DiffusionModels, TransitionBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class OnPolicyDistillation:
    """The distillation loss of verl-omni's ``opd``."""

    teacher: str
    """Local diffusers folder of the teacher; same family, latents and schedule as the student."""

    @property
    def requires(self) -> Requirements:
        """Stored stochastic steps of all samples, and the teacher."""
        return Requirements(teacher=self.teacher, zero_advantages=True, advantages=False)

    def loss(self, batch: DiffusionBatch, models: DiffusionModels) -> RowLoss:
        """Return the KL to the teacher's step."""
        rows = expect(batch, TransitionBatch)
        step = models.step(rows, models.velocity(rows))
        kl = gaussian_kl(step, models.step(rows, models.teacher_velocity(rows)))
        return RowLoss(loss=kl, metrics={"teacher_kl": kl.detach()})
