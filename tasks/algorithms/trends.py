"""Sequential tests for a rising or falling trend in a series of means. Pure, float64 inside.

After each epoch the last means are tested for a trend by ranks (Mann 1945; Kendall 1975), for any distribution of the
noise. Repeated tests use alpha spending (Lan and DeMets 1983): the error probability of the test after epoch n is
proportional to 1 / (n (n - 1)), which adds up to ``FALSE_ALARMS`` over any number of epochs. The windows of one test
share it. So a monitor without a trend raises a false alarm in at most that share of runs.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

#: Largest share of runs with a false alarm, of a monitor that does not fall or a reward that does not rise.
FALSE_ALARMS = 0.05
#: Maximum and minimum number of means in a test.
LONGEST, _FEWEST = 64, 5
#: Windows are halved down to this length; at this length or more the noise's autocorrelation is estimated.
_SHORTEST = 8
#: Residual share of the variance after the fit of a curve, below which autocorrelation is ignored.
_LEFT = 0.05


def trend(values: Tensor) -> float:
    """Return the Mann-Kendall statistic: nearly standard normal without a trend, above 0 where values rise.

    S is the number of rising pairs minus the number of falling pairs. The statistic is S moved by 1 towards 0, divided
    by its standard deviation (Kendall 1975, with his correction for ties). If the residuals of a quadratic curve have a
    positive lag-1 autocorrelation r, the variance is multiplied by (1 + r) / (1 - r) (after Yue and Wang 2004).

    Args:
        values: (N,) means of equally distant epochs.

    Returns:
        0 if all values are equal.
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
    """Return the lag-1 autocorrelation, 0 to 0.95, of the residuals of (N,) values from a quadratic curve."""
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
    """Return orthonormal quadratic curves over ``count`` epochs, (N, 3) float64."""
    x = torch.linspace(-1, 1, count, dtype=torch.float64)
    curves: Tensor = torch.linalg.qr(torch.stack([torch.ones_like(x), x, x.square()], 1))[0]
    return curves


def chance_of_trend(values: Tensor, sign: int) -> float:
    """Return the one-sided p-value of a rise (sign 1) or fall (-1) of (N,) values, if they have no trend.

    For few values it is exact, counted over all orders; for more it is the tail of ``trend``, which is not smaller.
    """
    if len(values) >= _SHORTEST:
        return math.erfc(sign * trend(values) / math.sqrt(2)) / 2
    later = sign * (values[None, :] - values[:, None])
    moved = int((later > 0).triu(1).sum())
    orders = _orders(tuple(sorted(values.unique(return_counts=True)[1].tolist())))
    return sum(orders[moved:]) / sum(orders)


@lru_cache
def _orders(repeats: tuple[int, ...]) -> list[int]:
    """Return the number of orders with 0, 1, 2, ... rising pairs, for values repeated ``repeats`` times.

    The coefficients of the Gaussian multinomial [n]! / ([m_1]! [m_2]! ...) in q, [k] = 1 + q + ... + q^(k - 1)
    (MacMahon 1913).
    """
    counts = [1]
    for size in range(2, sum(repeats) + 1):
        counts = [sum(counts[max(0, n - size + 1) : n + 1]) for n in range(len(counts) + size - 1)]
    for size in (size for repeat in repeats for size in range(2, repeat + 1)):
        quotient: list[int] = []
        for n in range(len(counts) - size + 1):
            quotient.append(counts[n] - sum(quotient[max(0, n - size + 1) : n]))
        counts = quotient
    return counts


def correlation(one: Tensor, other: Tensor) -> float | None:
    """Return Pearson's correlation of two (N,) tensors, or None if either is empty or constant up to rounding."""
    a, b = (values.double() - values.double().mean() for values in (one, other))
    for values, centered in ((one, a), (other, b)):
        if not len(values) or float(centered.abs().max()) <= 1e-12 * float(values.double().abs().max()):
            return None
    # Deviations scaled to at most 1 neither underflow nor overflow when squared.
    a, b = (centered / centered.abs().max() for centered in (a, b))
    return float((a * b).sum() / (a.norm() * b.norm()))


def opposed_window(rising: Tensor, falling: Tensor) -> int | None:
    """Return the number of last means over which one series significantly rose and the other fell; None: no window.

    Args:
        rising: (N,) means of all epochs, after each of which there was a test; the last ``LONGEST`` count.
        falling: (N,) means of the same epochs.
    """
    epochs = len(rising)
    if epochs < _FEWEST:
        return None
    sizes = _windows(min(epochs, LONGEST))
    # The sum over epochs from _FEWEST on is FALSE_ALARMS, because 1 / (n (n - 1)) = 1 / (n - 1) - 1 / n.
    allowed = FALSE_ALARMS * (_FEWEST - 1) / (epochs * (epochs - 1)) / len(sizes)

    for size in sizes:
        if all(chance_of_trend(each[-size:], sign) <= allowed for each, sign in ((falling, -1), (rising, 1))):
            return size
    return None


def _windows(longest: int) -> list[int]:
    """Return the window lengths, the longest first, each half of the previous one."""
    lengths = [longest]
    while lengths[-1] // 2 >= _SHORTEST:
        lengths.append(lengths[-1] // 2)
    return lengths


def first_opposed(rising: Tensor, falling: Tensor) -> int | None:
    """Return the number of (N,) means after which ``opposed_window`` first finds a window; None: never."""
    stops = range(_FEWEST, len(rising) + 1)
    return next((stop for stop in stops if opposed_window(rising[:stop], falling[:stop]) is not None), None)


def ends(values: Tensor) -> tuple[float, float]:
    """Return the means of the first and the last quarter of (N,) values, each at least one value."""
    size = max(1, len(values) // 4)
    return float(values[:size].mean()), float(values[-size:].mean())
