"""Whether a series of means rises or falls for certain, however often it is looked at. Pure, float64 inside.

After every epoch the last means are tested for a trend by ranks (Mann 1945; Kendall 1975), for any distribution of the
noise. Looks are paid for by alpha spending (Lan and DeMets 1983): the look after epoch n may err with a probability in
proportion to 1 / (n (n - 1)), which adds up to ``FALSE_ALARMS`` over any number of epochs, and the windows of one look
share it. So a monitor that is noise around one value is accused in at most that share of runs.
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


def chance_of_trend(values: Tensor, sign: int) -> float:
    """Return how likely (N,) values without a trend rise (sign 1) or fall (-1) as much as these, or more.

    Of few values it is counted over all of their orders, of more it is the tail of ``trend``, which is no lighter.
    """
    if len(values) >= _SHORTEST:
        return math.erfc(sign * trend(values) / math.sqrt(2)) / 2
    later = sign * (values[None, :] - values[:, None])
    moved = int((later > 0).triu(1).sum())
    orders = _orders(tuple(sorted(values.unique(return_counts=True)[1].tolist())))
    return sum(orders[moved:]) / sum(orders)


@lru_cache
def _orders(repeats: tuple[int, ...]) -> list[int]:
    """Return how many orders of values, each repeated so often, have 0, 1, 2, ... pairs that rise.

    The coefficients of the Gaussian multinomial [n]! / ([m_1]! [m_2]! ...) in q, [k] = 1 + q + ... + q^(k - 1)
    (MacMahon 1913).
    """
    found = [1]
    for size in range(2, sum(repeats) + 1):
        found = [sum(found[max(0, n - size + 1) : n + 1]) for n in range(len(found) + size - 1)]
    for size in (size for repeat in repeats for size in range(2, repeat + 1)):
        quotient: list[int] = []
        for n in range(len(found) - size + 1):
            quotient.append(found[n] - sum(quotient[max(0, n - size + 1) : n]))
        found = quotient
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
    if len(rising) < _FEWEST:
        return None
    sizes = _windows(min(len(rising), LONGEST))
    # Over all epochs from the fewest on these add up to FALSE_ALARMS, as 1 / (n (n - 1)) = 1 / (n - 1) - 1 / n.
    allowed = FALSE_ALARMS * (_FEWEST - 1) / (epochs * (epochs - 1)) / len(sizes)

    for size in sizes:
        if all(chance_of_trend(each[-size:], sign) <= allowed for each, sign in ((falling, -1), (rising, 1))):
            return size
    return None


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
