"""Whether a series of means rises or falls for certain, however often it is looked at. Pure, float64 inside.

After every epoch the last means are tested for a trend by ranks (Mann 1945; Kendall 1975), for any distribution and
size of the noise. Looks are paid for by alpha spending (Lan and DeMets 1983): look k may err with the
probability ``FALSE_ALARMS`` / (k (k + 1)), which adds up to ``FALSE_ALARMS`` over any number of epochs, and the windows
of one look share it. So a monitor that is noise around one value is accused in at most that share of runs.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

#: Largest share of runs in which a monitor that does not fall, or a reward that does not rise, may be accused.
FALSE_ALARMS = 0.05
#: Means that are looked at together at most, and how few are enough.
LONGEST, _FEWEST = 64, 5
#: Halves of a window are windows too, down to this length; from it on the noise's autocorrelation is estimated.
_SHORTEST = 8
#: Share of the spread that is left of a curve's fit, below which noise of any autocorrelation explains no trend.
_LEFT = 0.05


def trend(values: Tensor) -> float:
    """Return the Mann-Kendall statistic: about standard normal without a trend, above 0 where values rise.

    S, the pairs that rise less those that fall, moved by 1 towards 0, over its standard deviation (Kendall 1975, with
    his correction for ties). Where the noise about a quadratic curve has a positive autocorrelation r from one epoch to
    the next, the variance is (1 + r) / (1 - r) times as large (after Yue and Wang 2004).

    Args:
        values: (N,) means of equally distant epochs.

    Returns:
        0 where all values are equal.
    """
    y, count = values.double(), len(values)
    surplus = float(torch.sign(y[None, :] - y[:, None]).triu(1).sum())
    ties = y.unique(return_counts=True)[1].double()
    pairs = count * (count - 1) * (2 * count + 5) - float((ties * (ties - 1) * (2 * ties + 5)).sum())
    if pairs <= 0 or abs(surplus) <= 1:
        return 0.0
    repeated = _autocorrelation(y)
    deviation = math.sqrt(pairs / 18 * (1 + repeated) / (1 - repeated))
    return math.copysign(abs(surplus) - 1, surplus) / deviation


def _autocorrelation(y: Tensor) -> float:
    """Return the lag-1 autocorrelation, 0 to 0.95, of what (N,) values have besides a quadratic curve."""
    if len(y) < _SHORTEST:
        return 0.0
    basis = _quadratics(len(y))
    left, centered = y - basis @ (basis.T @ y), y - y.mean()
    spread = float(left.square().sum())
    if spread <= _LEFT * float(centered.square().sum()):
        return 0.0
    return min(max(float((left[1:] * left[:-1]).sum()) / spread, 0.0), 0.95)


@lru_cache
def _quadratics(count: int) -> Tensor:
    """Return orthonormal quadratic curves over so many epochs, (N, 3) float64."""
    x = torch.linspace(-1, 1, count, dtype=torch.float64)
    found: Tensor = torch.linalg.qr(torch.stack([torch.ones_like(x), x, x.square()], 1))[0]
    return found


def correlation(one: Tensor, other: Tensor) -> float | None:
    """Return Pearson's correlation of two (N,) tensors, None where either is constant, but for rounding, or empty."""
    a, b = (values.double() - values.double().mean() for values in (one, other))
    for values, centered in ((one, a), (other, b)):
        if not len(values) or float(centered.abs().max()) <= 1e-12 * float(values.double().abs().max()):
            return None
    # Squares of deviations of one size neither underflow nor overflow.
    a, b = (centered / centered.abs().max() for centered in (a, b))
    return float((a * b).sum() / (a.norm() * b.norm()))


def opposed_window(rising: Tensor, falling: Tensor, *, epochs: int | None = None) -> int | None:
    """Return over how many of the last means one series certainly rose and the other fell; None: over no window.

    Args:
        rising: (N,) means of the last epochs; of these ``LONGEST`` count.
        falling: (N,) means of the same epochs.
        epochs: epochs up to the last of them, after each of which there was a look; None: N.
    """
    epochs = len(rising) if epochs is None else epochs
    look = epochs - _FEWEST + 1
    if look < 1 or len(rising) < _FEWEST:
        return None
    sizes = _windows(min(len(rising), LONGEST))
    allowed = FALSE_ALARMS / (look * (look + 1)) / len(sizes)

    def certain(values: Tensor, sign: int) -> bool:
        return math.erfc(sign * trend(values) / math.sqrt(2)) / 2 <= allowed

    shown = (size for size in sizes if certain(falling[-size:], -1) and certain(rising[-size:], 1))
    return next(shown, None)


def _windows(longest: int) -> list[int]:
    """Return the lengths of windows, the longest first, each half of the one before."""
    found = [longest]
    while found[-1] // 2 >= _SHORTEST:
        found.append(found[-1] // 2)
    return found


def first_opposed(rising: Tensor, falling: Tensor) -> int | None:
    """Return after how many of (N,) means ``opposed_window`` first finds one; None: never."""
    stops = range(_FEWEST, len(rising) + 1)
    return next((stop for stop in stops if opposed_window(rising[:stop], falling[:stop]) is not None), None)


def ends(values: Tensor) -> tuple[float, float]:
    """Return the means of the first and of the last fourth of (N,) values, of one value at least."""
    size = max(1, len(values) // 4)
    return float(values[:size].mean()), float(values[-size:].mean())
