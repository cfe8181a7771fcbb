"""Steps of UniRL's kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flowmill.models.maths.kernels import CPS, DanceSDE
from flowmill.models.maths.transitions import FlowSDE, Grid, Kernel
from tests.golden.algorithms2026.rows import check
from tests.golden.vectors import Vectors

Open = Callable[[str], tuple[Vectors, dict[str, Any]]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", ["flow", "cps", "dance"])
def test_steps(vectors: Open, dtype: torch.dtype, name: str) -> None:
    data, meta = vectors("unirl_kernels.npz")
    eta = meta["eta"][name]
    kernels: dict[str, Kernel] = {"flow": FlowSDE(eta), "cps": CPS(eta, "squared"), "dance": DanceSDE(eta)}
    sigma, following = data.tensor("sigma", dtype), data.tensor("sigma_next", dtype)
    # At sigma 1 theirs has 0.99 in the denominator, regardless of the grid: the second value of a grid that fine.
    places = Grid(sigma, following, torch.full_like(sigma, 0.99))
    step = kernels[name].step(data.tensor(f"{name}_x", dtype), data.tensor(f"{name}_v", dtype), places)
    check(step.mean, data, f"{name}_mean")
    check(step.log_prob(data.tensor(f"{name}_next", dtype)), data, f"{name}_log_prob")
