"""Whether a series of means rises or falls for certain. Pure: tensors in, numbers out, float64 inside."""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: Means that are looked at together, the last ones, and how few are enough.
_WINDOW, _FEWEST = 5, 4
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
    """Return Pearson's correlation of two (N,) tensors, None where either is constant."""
    if any(bool((values == values[0]).all()) for values in (one, other)):
        return None
    a, b = (values.double() - values.double().mean() for values in (one, other))
    return float((a * b).sum() / (a.norm() * b.norm()))


def opposed(rising: Tensor, falling: Tensor) -> tuple[int, int] | None:
    """Return the first and last place of the first window in which one series certainly rose and the other fell.

    Args:
        rising: (N,) means of epochs.
        falling: (N,) means of the same epochs.
    """
    for stop in range(_FEWEST, len(rising) + 1):
        window = slice(max(0, stop - _WINDOW), stop)
        if trend(rising[window]) >= _UP and trend(falling[window]) <= -_DOWN:
            return window.start, stop - 1
    return None
