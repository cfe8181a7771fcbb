"""Checks that outputs of models are finite, and that schedules lead from noise to images."""

from __future__ import annotations

import torch
from torch import Tensor

from flowmill.configs.errors import ConfigError, SamplingError
from flowmill.models.policies.diffusion import DiffusionPolicy


def noise_levels(policy: DiffusionPolicy, steps: int) -> Tensor:
    """Return the (T + 1,) sigmas of a policy, after checking that they lead from noise to data; raise ConfigError if
    they do not: samples would be NaN, or not the model's."""
    levels = policy.sigmas(steps)
    falls = bool((levels[1:] < levels[:-1]).all())
    if falls and bool(torch.isfinite(levels).all()) and float(levels[0]) <= 1 + 1e-6 and float(levels[-1]) >= 0:
        return levels
    raise ConfigError(
        f"With {steps} steps the scheduler of model.path gives the noise levels {levels_in_words(levels)}. They have "
        "to fall from 1 or less to 0 or more, one after the other. Correct the scheduler's config, or change the "
        "number of steps."
    )


def levels_in_words(levels: Tensor) -> str:
    """Return noise levels as a text: the first three and the last two of many."""
    texts = [f"{level:.4g}" for level in levels.flatten().tolist()]
    return ", ".join(texts if len(texts) < 7 else [*texts[:3], "...", *texts[-2:]])


def pixels(unit: Tensor) -> Tensor:
    """Return values in [0, 1] as uint8, rounded as pipelines round them. Raises SamplingError if values are not finite;
    they would become black."""
    finite(unit, "decoded images")
    return (unit.float() * 255).round().to(torch.uint8)


def waves(unit: Tensor) -> Tensor:
    """Return (B, C, N) waveforms in [-1, 1] as (B, N, C) int16, rounded and clipped. Raises SamplingError if values are
    not finite; they would become silence."""
    finite(unit, "decoded sounds")
    return (unit.float().clamp(-1, 1) * 32767).round().to(torch.int16).transpose(1, 2).contiguous()


def finite(values: Tensor, label: str) -> None:
    """Check that a model's output is finite: NaN would become black images that are scored and trained on. Raises
    SamplingError if some are not. ``values``: (B, ...)."""
    good = torch.isfinite(values).flatten(1).all(1) if values.ndim > 1 else torch.isfinite(values)
    if bool(good.all()):
        return
    rows = (~good).nonzero().flatten().tolist()
    raise SamplingError(
        f"The {label} of {len(rows)} of {len(good)} rows are not finite (NaN or infinite), the first is row {rows[0]} "
        "of its batch. Set model.dtype to 'bfloat16' or 'float32' if it is 'float16'; else the weights or the noise "
        "schedule of model.path are at fault, or training has destroyed the policy: lower optimize.learning_rate."
    )
