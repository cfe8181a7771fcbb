"""Flow-OPD: distillation (gkd) and the reward alone (task_only), next to a KL to the base model.

Its modes kl_only and mixed are not compared: there an advantage of (B, 1) meets a ratio of (B,), so that every sample
gets the mean KL of all, and advantages keep their gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from flowmill.models.maths.transitions import Gaussian, Grid
from flowmill.tasks.algorithms.base import Algorithm
from flowmill.tasks.algorithms.diffusion import DiffusionModels, TransitionBatch
from flowmill.tasks.algorithms.grpo import GRPO
from flowmill.tasks.algorithms.opd import OnPolicyDistillation
from tests.golden.algorithms2026.rows import check, given, stepped
from tests.golden.given import Given, Scored
from tests.golden.vectors import Vectors

Open = Callable[[str], tuple[Vectors, dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Means:
    """A step whose means are the velocities; its std is s, as theirs leaves |dt| out."""

    std: Tensor
    log_prob: Tensor
    stochastic = True

    def step(self, latents: Tensor, velocity: Tensor, grid: Grid) -> Gaussian:
        return Scored(velocity, self.std, rate=self.std, known=self.log_prob)


class Taught(Given):
    """One with a teacher besides."""

    def __init__(self, velocity: Tensor, reference: Tensor, teacher: Tensor) -> None:
        super().__init__(velocity, reference)
        self.teacher = teacher

    def teacher_velocity(self, latents: Tensor, sigma: Tensor, conditioning: Any) -> Tensor:
        return self.teacher


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("mode", ["gkd", "task_only"])
def test_losses(vectors: Open, dtype: torch.dtype, mode: str) -> None:
    data, meta = vectors("flow_opd.npz")
    mean, teacher, base = (data.tensor(key, dtype) for key in (f"{mode}_mean", "mean_teacher", "mean_base"))
    mean.requires_grad_()
    std, log_prob = data.tensor("std_dev_t", dtype).flatten(), data.tensor(f"{mode}_log_prob", dtype)
    following, old = (data.tensor(key, dtype) for key in ("next", f"{mode}_log_probs_old"))
    if mode == "task_only":
        # The gradient goes through the density, whose value is the stored one up to a constant.
        density = Gaussian(mean, std).log_prob(following)
        log_prob = density + (log_prob - density).detach()
    half = torch.full_like(std, 0.5)
    advantages = data.tensor(f"{mode}_advantages_in", dtype)[:, 0]
    rows: TransitionBatch = stepped(following, following, Grid(half, half / 2, half), advantages, old)
    policy: Any = Taught(mean, base, teacher)
    models = DiffusionModels(trainable=policy, kernel=Means(std, log_prob), behavior=given(mean, mean, base).behavior)
    options: dict[str, Any] = {"kl_coef": meta["beta"], "kl": "flow_grpo"}
    algorithm: Algorithm = (
        OnPolicyDistillation(teacher="given", **options) if mode == "gkd" else GRPO(clip_range=meta["clip"], **options)
    )
    loss = algorithm.loss(rows, models).loss.mean()
    check(loss, data, f"{mode}_loss")
    check(torch.autograd.grad(loss, mean)[0], data, f"{mode}_grad_mean")
