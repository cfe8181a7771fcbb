"""On-policy distillation: frozen teachers of the same family replay the states the student visited.

The loss is the true Gaussian KL of student and teacher steps, mean (mu - mu_T)^2 / (2 s^2 |dt|): it falls as the
student approaches the teacher and is 0 there. It uses no reward, so all samples count, regardless of their advantage.

Flow-OPD (arXiv 2605.08063) has a teacher for each source of prompts, and also a KL to the base model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

from pydantic import Field

from flowmill.configs.path_types import FolderPlace
from flowmill.models.maths.transitions import gaussian_kl
from flowmill.tasks.algorithms.base import Requirements, RowLoss, expect
from flowmill.tasks.algorithms.diffusion import DiffusionBatch, DiffusionModels, TransitionBatch
from flowmill.tasks.algorithms.grpo import KL


@dataclass(frozen=True, slots=True, kw_only=True)
class OnPolicyDistillation(KL):
    """The distillation loss of verl-omni's ``opd``, and of Flow-OPD's ``gkd``, which omits |dt|."""

    teacher: FolderPlace | None = None
    """Local diffusers folder of the teacher; same family, latents and schedule as the student."""
    teachers: Mapping[Annotated[str, Field(min_length=1)], FolderPlace] = field(default_factory=dict)
    """Instead of ``teacher``: the folder of a teacher for each of ``prompts.sources``, by name."""

    def __post_init__(self) -> None:
        if (self.teacher is None) == (not self.teachers):
            raise ValueError("it needs either 'teacher', a folder, or 'teachers', one for each of prompts.sources.")

    @property
    def requires(self) -> Requirements:
        """Requires stored stochastic steps of all samples and the teachers; a KL also the base model or the average."""
        teachers = tuple(self.teachers.items()) if self.teacher is None else (("", self.teacher),)
        base = self.kl_needs(old_means=False)
        needs = replace(base, min_group_size=1, teachers=teachers, zero_advantages=True, advantages=False)
        return replace(needs, approx_kl=False)

    def loss(self, batch: DiffusionBatch, models: DiffusionModels) -> RowLoss:
        """Return the KL to the teacher's step, plus the other KL if set."""
        rows = expect(batch, TransitionBatch)
        velocity = models.velocity(rows)
        loss = gaussian_kl(models.step(rows, velocity), models.step(rows, models.teacher_velocity(rows)))
        metrics = {"teacher_kl": loss.detach()}
        return RowLoss(loss=self.add_kl(rows, models, velocity, loss, metrics), metrics=metrics)
