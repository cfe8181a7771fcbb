"""Whether a series of means rises or falls for certain. Pure: tensors in, numbers out, float64 inside."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

#: Means that are looked at together, the last ones, and how few are enough.
WINDOW, _FEWEST = 5, 4
#: Standard errors that a slope up and a slope down must be from zero. What is optimized rises steadily, what is not is
#: noisier, and where nothing is wrong the two rise together.
_UP, _DOWN = 3.0, 2.0


def trend(values: Tensor) -> float:
    """Return the t statistic of the slope of a least squares line: how many of its standard errors it is from zero.

    Args:
        values: (N,) means of equally distant epochs, N >= 3.

    Returns:
        0 where all values are equal, an infinity where they lie on another line exactly.
    """
    y = values.double() - values.double().mean()
    x = torch.arange(len(y), dtype=torch.float64)
    x = x - x.mean()
    slope = float((x * y).sum() / x.square().sum())
    residual = float((y - slope * x).square().sum()) / (len(y) - 2)
    error = math.sqrt(residual / float(x.square().sum()))
    if error <= 1e-12 * float(y.abs().max()):
        return 0.0 if slope == 0.0 else math.copysign(math.inf, slope)
    return slope / error


def correlation(one: Tensor, other: Tensor) -> float | None:
    """Return Pearson's correlation of two (N,) tensors, None where either is constant, but for rounding, or empty."""
    a, b = (values.double() - values.double().mean() for values in (one, other))
    for values, centered in ((one, a), (other, b)):
        if not len(values) or float(centered.abs().max()) <= 1e-12 * float(values.double().abs().max()):
            return None
    # Squares of deviations of one size neither underflow nor overflow.
    a, b = (centered / centered.abs().max() for centered in (a, b))
    return float((a * b).sum() / (a.norm() * b.norm()))


def opposes(rising: Tensor, falling: Tensor) -> bool:
    """Return whether over the last ``WINDOW`` of (N,) means of epochs one certainly rose and the other fell."""
    if len(rising) < _FEWEST:
        return False
    return trend(rising[-WINDOW:]) >= _UP and trend(falling[-WINDOW:]) <= -_DOWN


def first_opposed(rising: Tensor, falling: Tensor) -> int | None:
    """Return after how many of (N,) means ``opposes`` first holds; None: never."""
    return next((stop for stop in range(1, len(rising) + 1) if opposes(rising[:stop], falling[:stop])), None)
