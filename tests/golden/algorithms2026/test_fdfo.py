"""FDFO: SPO's surrogate of a pair's finite difference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tasks.algorithms.awm import AWM
from tests.golden.algorithms2026.rows import check, given, noised
from tests.golden.vectors import Vectors

Open = Callable[[str], tuple[Vectors, dict[str, Any]]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("policy", ["ref", "moved"])
def test_spo(vectors: Open, dtype: torch.dtype, policy: str) -> None:
    data, meta = vectors("fdfo.npz")
    velocity, old, target = (data.tensor(f"{policy}_{key}", dtype) for key in ("v", "v_ref", "v_target"))
    velocity.requires_grad_()
    advantages = data.tensor("dR", dtype)
    # Its log-prob is minus the squared distance to a velocity, as that of AWM is to noise - clean.
    rows = noised(torch.zeros_like(target), target, torch.full_like(advantages, 0.5), advantages)
    algorithm = AWM(surrogate="spo", clip_range=meta["clip_range"])
    result = algorithm.loss(rows, given(velocity, old, old))
    check(result.metrics["ratio"], data, f"{policy}_ratio")
    check(result.loss, data, f"{policy}_policy_loss")
    check(torch.autograd.grad(result.loss.mean(), velocity)[0], data, f"{policy}_grad_v")
