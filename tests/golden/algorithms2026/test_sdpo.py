"""Diffusion-SDPO: how much of the worse sample's gradient is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flowmill.tasks.algorithms.base import RowLoss
from flowmill.tasks.algorithms.dpo import DPO
from flowmill.tasks.algorithms.objectives import loser_share
from tests.golden.algorithms2026.rows import check, given, noised
from tests.golden.vectors import Vectors

Open = Callable[[str], tuple[Vectors, dict[str, Any]]]


def cases(data: Vectors, kind: str) -> list[tuple[str, float]]:
    names = sorted(key.removesuffix("_pred") for key in data if key.startswith(kind) and key.endswith("_pred"))
    return [(name, float(name.split("_mu")[1])) for name in names]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("kind", ["diffusion_dpo", "dspo", "dmpo"])
def test_the_share_of_one_micro_batch(vectors: Open, dtype: torch.dtype, kind: str) -> None:
    """Theirs is one number for all pairs: that of one pair whose samples are all winners and all losers."""
    data, _ = vectors("sdpo.npz")
    for name, margin in cases(data, kind):
        residuals = (data.tensor(f"{name}_pred", dtype) - data.tensor("target", dtype)).reshape(2, -1)
        sign, ones = torch.tensor([1.0, -1.0]), torch.ones(2)
        share = loser_share(residuals, sign, ones, torch.zeros(2, dtype=torch.int64), margin)
        assert float(share[0]) == 1.0
        check(share[1], data, f"{name}_lambda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_diffusion_dpo(vectors: Open, dtype: torch.dtype) -> None:
    data, meta = vectors("sdpo.npz")
    target = data.tensor("target", dtype)
    half = len(target) // 2
    won = torch.tensor([1.0] * half + [-1.0] * half, dtype=dtype)
    rows = noised(torch.zeros_like(target), target, torch.full_like(won, 0.5), won, torch.arange(half).repeat(2))
    for name, margin in cases(data, "diffusion_dpo"):
        prediction, reference = (data.tensor(f"{name}_{key}", dtype) for key in ("pred", "ref"))

        def learned(option: float | None, at: Tensor = prediction, base: Tensor = reference) -> tuple[RowLoss, Tensor]:
            velocity = at.clone().requires_grad_()
            result = DPO(beta=meta["beta_dpo"], winner_margin=option).loss(rows, given(velocity, velocity, base))
            return result, torch.autograd.grad(result.loss.mean(), velocity)[0]

        (result, gradient), (plain, whole) = learned(margin), learned(None)
        check(result.loss.mean(), data, f"{name}_loss")
        torch.testing.assert_close(result.loss, plain.loss)
        # A pair's own share, where theirs is that of the micro-batch.
        share = result.metrics["loser_share"].reshape(-1, 1, 1, 1)
        torch.testing.assert_close(gradient, share * whole)
        theirs = torch.where(won > 0, 1.0, data.tensor(f"{name}_lambda", dtype)).reshape(-1, 1, 1, 1)
        check(theirs * whole, data, f"{name}_grad")
