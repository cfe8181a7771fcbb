"""FDFO: its step is CPS, its loss SPO's surrogate of a pair's finite difference."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flowmill.models.maths.kernels import CPS
from flowmill.models.maths.transitions import Grid
from flowmill.tasks.advantages.groups import Normalizer, group_advantages
from flowmill.tasks.algorithms.awm import AWM
from flowmill.tasks.algorithms.fdfo import FDFO
from tests.golden.algorithms2026.rows import check, given, noised, stepped
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("policy", ["ref", "moved"])
def test_pairs(vectors: Open, dtype: torch.dtype, policy: str) -> None:
    data, meta = vectors("fdfo.npz")
    velocity, old = (data.tensor(f"{policy}_{key}", dtype) for key in ("v", "v_ref"))
    velocity.requires_grad_()
    rewards, final = (data.tensor(key, dtype) for key in ("rewards", "final"))
    groups = torch.arange(len(rewards)) // 2
    advantages = group_advantages(rewards, groups, Normalizer(std="none")).to(dtype)
    check(advantages, data, "dR")
    check((final - final.reshape(-1, 2, *final.shape[1:]).flip(1).reshape(final.shape)) / 2, data, "dx")
    one = torch.full_like(advantages, 0.5)
    rows = stepped(final, final, Grid(one, one / 2, one), advantages, one, finals=final, units=groups)
    result = FDFO(clip_range=meta["clip_range"]).loss(rows, given(velocity, old, old))
    check(result.metrics["ratio"], data, f"{policy}_ratio")
    check(result.loss, data, f"{policy}_policy_loss")
    check(torch.autograd.grad(result.loss.mean(), velocity)[0], data, f"{policy}_grad_v")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_the_sampler_is_cps(vectors: Open, dtype: torch.dtype) -> None:
    data, meta = vectors("fdfo.npz")
    sigmas, kernel = (
        data.tensor("sigmas", dtype),
        CPS(2 / math.pi * math.asin(math.sqrt(1 - (1 + meta["gamma"]) ** -2))),
    )
    latents, velocity, noise = (data.tensor(key, dtype) for key in ("x", "v", "noise"))
    following = [
        kernel.step(latents[row], velocity[row], Grid(*(level.expand(len(latents[row])) for level in levels))).sample(
            noise[row]
        )
        for row, step in enumerate(meta["steps"])
        for levels in ((sigmas[step], sigmas[step + 1], sigmas[1]),)
    ]
    check(torch.stack(following), data, "next")
