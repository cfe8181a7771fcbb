"""The linear form of reward_gradient: its gradient at a velocity is the one FlowBP's Sparse form backpropagates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from flowmill.models.maths.transitions import Grid
from flowmill.tasks.algorithms.reward_gradient import RewardGradient
from tests.golden.algorithms2026.rows import check, given, noised
from tests.golden.vectors import Vectors

Open = Callable[[str], tuple[Vectors, dict[str, Any]]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_sparse(vectors: Open, dtype: torch.dtype) -> None:
    data, _ = vectors("flowbp.npz")
    sigmas, active = data.tensor("sigmas", torch.float64), data.tensor("sparse_active", dtype)
    steps, rows = active.shape[:2]
    # Theirs is the mean over samples and dims of weight x0, which falls; ours a reward per sample, which rises.
    weight = data.tensor("reward_weight", dtype)
    slope = -(weight / weight.numel() / rows).expand(steps * rows, *weight.shape)
    # What x0 moves by with a velocity: there the step times the factor that stands for those left out, here the level.
    moves = float(data["sparse_rescale"]) * -sigmas.diff()[data.tensor("sparse_indices")]
    level = moves.repeat_interleave(rows).to(dtype)
    velocity = active.flatten(0, 1).requires_grad_()
    batch = noised(torch.zeros_like(slope), torch.zeros_like(slope), level, torch.ones_like(level))
    batch = replace(batch, gradients=slope, grid=Grid(level, torch.zeros_like(level), level))
    loss = RewardGradient(target="linear", strength=1.0).loss(batch, given(velocity, velocity, velocity)).loss
    (found,) = torch.autograd.grad(loss.sum(), velocity)
    check(found.unflatten(0, (steps, rows)), data, "sparse_grad")
