"""RAM and V-GRPO: the losses that trainers following the official ones compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tasks.algorithms.diffusion import ForwardBatch
from tasks.algorithms.ram import RAM
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
