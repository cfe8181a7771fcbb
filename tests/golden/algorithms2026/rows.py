"""Batches of stored numbers, and comparisons with stored ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowmill.models.maths.conditioning import Conditioning
from flowmill.models.maths.transitions import FlowSDE, Grid, Kernel
from flowmill.tasks.algorithms.diffusion import DiffusionModels, ForwardBatch, TransitionBatch
from tests.golden.given import Given
from tests.golden.vectors import Vectors


def common(advantages: Tensor, units: Tensor | None = None) -> dict[str, Any]:
    """Return what all rows have."""
    rows, ones = len(advantages), torch.ones_like(advantages)
    zeros = torch.zeros(rows, dtype=torch.int64)
    return {
        "advantages": advantages,
        "conditioning": Conditioning({}),
        "weights": ones,
        "units": torch.arange(rows) if units is None else units,
        "importance": ones,
        "count": rows,
        "age": zeros,
        "step": zeros,
        "keys": tuple((row, 0) for row in range(rows)),
    }


def noised(clean: Tensor, noise: Tensor, time: Tensor, advantages: Tensor, units: Tensor | None = None) -> ForwardBatch:
    """Return samples noised to their levels."""
    level = time.reshape(-1, *[1] * (clean.ndim - 1))
    return ForwardBatch(
        latents=(1 - level) * clean + level * noise,
        clean=clean,
        noise=noise,
        grid=Grid(time, torch.zeros_like(time), time),
        **common(advantages, units),
    )


def stepped(
    latents: Tensor, following: Tensor, grid: Grid, advantages: Tensor, old_log_probs: Tensor, **more: Any
) -> TransitionBatch:
    """Return stored steps."""
    one = torch.ones_like(advantages)
    own: dict[str, Any] = {"mean_std": one, "mean_rectifier": one, **common(advantages), **more}
    return TransitionBatch(latents=latents, next_latents=following, grid=grid, old_log_probs=old_log_probs, **own)


def given(velocity: Tensor, behavior: Tensor, reference: Tensor, kernel: Kernel | None = None) -> DiffusionModels:
    """Return models whose velocities are stored."""
    policy: Any = Given(velocity, reference)
    return DiffusionModels(trainable=policy, kernel=kernel or FlowSDE(), behavior=[behavior])


def check(found: Tensor, data: Vectors, key: str, *, atol: float = 1e-5) -> None:
    """Compare numbers with stored ones, 1e-5 of each and of the largest."""
    expected = np.asarray(data[key])
    scale = float(np.abs(expected).max()) or 1.0
    np.testing.assert_allclose(found.detach(), expected, rtol=1e-5, atol=atol * scale, err_msg=key)
