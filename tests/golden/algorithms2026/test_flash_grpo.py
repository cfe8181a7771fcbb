"""Flash-GRPO: its step, and the loss with rectified advantages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from flowmill.models.maths.kernels import WanSDE
from flowmill.models.maths.transitions import Grid, rectifiers
from flowmill.models.maths.transitions import grid_of as every_step
from flowmill.tasks.algorithms.flash_grpo import FlashGRPO
from tests.golden.algorithms2026.rows import check, given, stepped
from tests.golden.given import GivenLogProb
from tests.golden.vectors import Vectors

Open = Callable[[str], tuple[Vectors, dict[str, Any]]]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])


def grid_of(data: Vectors, steps: list[int], dtype: torch.dtype) -> Grid:
    sigmas = data.tensor("sigmas", dtype)
    places = torch.tensor(steps)
    return Grid(sigmas[places], sigmas[places + 1], sigmas[1].expand(len(places)))


@DTYPES
def test_step_and_its_rectifier(vectors: Open, dtype: torch.dtype) -> None:
    data, meta = vectors("flash_grpo.npz")
    grid = grid_of(data, meta["idx"], dtype)
    latents, velocity, following = (data.tensor(key, dtype) for key in ("x", "v", "next"))
    step = WanSDE().step(latents, velocity, grid)
    assert step.rate is not None
    check(step.rate, data, "s")
    check(step.std / step.rate, data, "sqrt_dt")
    check(step.mean, data, "mean")
    check(step.log_prob(following), data, "log_prob")
    check(rectifiers(WanSDE(), grid), data, "coefficient")


def test_the_ten_literals_are_those_of_the_published_schedule(vectors: Open) -> None:
    data, _ = vectors("flash_grpo.npz")
    # 20 steps from 0.999 down, shifted by 3.
    even = torch.linspace(0.999, 0, 21, dtype=torch.float64)
    sigmas = 3 * even / (1 + 2 * even)
    assert (sigmas[:10] * 1000).int().tolist() == data["literal_timesteps"].tolist()
    np.testing.assert_allclose(rectifiers(WanSDE(), every_step(sigmas))[:10], data["literal_values"], rtol=2e-5)


@DTYPES
def test_loss(vectors: Open, dtype: torch.dtype) -> None:
    data, meta = vectors("flash_grpo.npz")
    advantages, old, coefficient = (data.tensor(key, dtype) for key in ("advantages", "log_prob_old", "coefficient"))
    log_prob = data.tensor("log_prob", dtype).requires_grad_()
    velocity, latents = data.tensor("v", dtype), data.tensor("x", dtype)
    mean = coefficient.mean().expand(len(advantages))
    grid = grid_of(data, meta["idx"], dtype)
    rows = stepped(latents, data.tensor("next", dtype), grid, advantages, old, mean_rectifier=mean)
    models = given(velocity, velocity, velocity, GivenLogProb(WanSDE(), log_prob))
    loss = FlashGRPO(clip_range=1e-3).loss(rows, models).loss.mean()
    check(loss, data, "loss")
    check(torch.autograd.grad(loss, log_prob)[0], data, "grad_log_prob")
