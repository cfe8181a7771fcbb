"""RAM and V-GRPO: the losses that trainers following the official ones compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flowmill.tasks.advantages.groups import shape_advantages
from flowmill.tasks.algorithms.diffusion import ForwardBatch
from flowmill.tasks.algorithms.objectives import adaptive_error
from flowmill.tasks.algorithms.ram import RAM
from flowmill.tasks.algorithms.v_grpo import VGRPO
from tests.golden.algorithms2026.rows import check, given, noised
from tests.golden.vectors import Vectors

Open = Callable[[str], tuple[Vectors, dict[str, Any]]]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])


def rows_of(data: Vectors, dtype: torch.dtype, advantages: str = "advantages") -> ForwardBatch:
    return noised(*(data.tensor(key, dtype) for key in ("x0", "eps", "t", advantages)))


@DTYPES
def test_ram(vectors: Open, dtype: torch.dtype) -> None:
    data, meta = vectors("forward_2026.npz")
    velocity, old, base = (data.tensor(key, dtype) for key in ("ram_v", "v_old", "v_base"))
    velocity.requires_grad_()
    loss = RAM(multiplier=meta["multiplier"]).loss(rows_of(data, dtype), given(velocity, old, base)).loss
    check(loss, data, "ram_loss")
    check(torch.autograd.grad(loss.mean(), velocity)[0], data, "ram_grad")


@DTYPES
@pytest.mark.parametrize("policy", ["on", "off"])
def test_v_grpo(vectors: Open, dtype: torch.dtype, policy: str) -> None:
    data, meta = vectors("forward_2026.npz")
    rows, name = rows_of(data, dtype, "soft_advantages"), f"vgrpo_{policy}"
    velocity, old = data.tensor(f"{name}_v", dtype).requires_grad_(), data.tensor("v_old", dtype)
    result = VGRPO(clip_range=meta["clip"]).loss(rows, given(velocity, old, old))
    check(result.metrics["ratio"], data, f"{name}_rho")
    check(result.loss, data, f"{name}_loss")
    check(torch.autograd.grad(result.loss.mean(), velocity)[0], data, f"{name}_grad")
    state = (rows.latents, rows.clean, rows.grid.sigma)
    check(adaptive_error(velocity, state), data, f"{name}_L")
    check(adaptive_error(old, state), data, f"{name}_L_old")


def test_soft_advantages(vectors: Open) -> None:
    data, meta = vectors("forward_2026.npz")
    groups = torch.zeros(len(data["advantages"]), dtype=torch.int64)
    check(shape_advantages(data.tensor("advantages"), groups, soft_clip=meta["eta"]), data, "soft_advantages")
