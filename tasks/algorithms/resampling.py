"""Confidence intervals of means over prompts, and tests of differences. Pure: arrays in, numbers out, float64 inside.

The sampling unit is the prompt: images of one prompt are not independent, so each prompt counts with its mean.

Legend: P prompts, R resamples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

#: Resamples in total, and in memory at a time.
_RESAMPLES, _CHUNK = 10_000, 500


#: Minimum prompts for an interval: with fewer, no interval of useful width covers the mean in 95 % of cases.
FEWEST = 20
#: The 97.5 % quantile of a standard normal.
_Z = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean with its confidence interval."""

    mean: float
    """Mean over prompts."""
    low: float | None
    """Lower end of its 95 % interval; None: too few prompts."""
    high: float | None
    """Upper end."""

    def within(self, least: float, most: float) -> Estimate:
        """Return the estimate with its interval clipped to the range of a mean; unchanged if the mean is outside."""
        if self.low is None or self.high is None or not least <= self.mean <= most:
            return self
        return replace(self, low=max(self.low, least), high=min(self.high, most))


def mean_with_interval(values: np.ndarray, *, bounds: tuple[float, float] | None = None, seed: int = 0) -> Estimate:
    """Return the mean of (P,) prompts with its 95 % interval, if there are at least ``FEWEST`` prompts.

    If all values are 0 or 1, or at either bound, the interval is Wilson's (1927), which has a width for equal values
    too. Otherwise it is the union of the intervals of Student's t and of the studentized bootstrap (Efron and
    Tibshirani 1993, 12.5): the first is accurate for symmetric values, the second for skewed ones. It is clipped to the
    bounds, which keeps its coverage because no mean lies outside. For equal values within bounds it is Wilson's too:
    values at the bounds have the largest variance about their mean.

    Args:
        values: (P,) one per prompt.
        bounds: lowest and highest possible value; ignored if a value lies outside.
        seed: seed of the resamples.
    """
    values = np.asarray(values, np.float64)
    mean, count = float(values.mean()), len(values)
    if count < FEWEST:
        return Estimate(mean=mean, low=None, high=None)
    known = bounds is not None and bounds[0] <= values.min() and values.max() <= bounds[1]
    least, most = bounds if known and bounds is not None else (0.0, 1.0)
    error = float(values.std(ddof=1)) / math.sqrt(count)
    if bool(np.isin(values, (least, most)).all()) or (known and error == 0):
        low, high = (least + (most - least) * end for end in _wilson((mean - least) / (most - least), count))
        return Estimate(mean=mean, low=low, high=high)
    below, above = _studentized(values, seed) if error > 0 else (0.0, 0.0)
    t = _student(count - 1)
    found = Estimate(mean=mean, low=mean - max(t, above) * error, high=mean + max(t, -below) * error)
    return found.within(least, most) if known else found


def _wilson(share: float, count: int) -> tuple[float, float]:
    """Return Wilson's interval of a share of ``count`` draws."""
    middle = share + _Z**2 / (2 * count)
    half = _Z * math.sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2))
    return (middle - half) / (1 + _Z**2 / count), (middle + half) / (1 + _Z**2 / count)


def _student(freedom: int) -> float:
    """Return Student's 97.5 % quantile by its expansion (Abramowitz and Stegun 26.7.5), within 1e-4 for 9 or more."""
    z = _Z
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def _studentized(values: np.ndarray, seed: int) -> tuple[float, float]:
    """Return the 2.5 and 97.5 % quantiles of (mean* - mean) / error* over resamples that are not constant."""
    draw, count = np.random.default_rng(seed), len(values)
    found = []
    for _ in range(_RESAMPLES // _CHUNK):
        drawn = values[draw.integers(0, count, (_CHUNK, count))]
        error = drawn.std(1, ddof=1) / math.sqrt(count)
        varied = error > 1e-12 * np.abs(values).max()
        found.append((drawn.mean(1)[varied] - values.mean()) / error[varied])
    low, high = np.quantile(np.concatenate(found), [0.025, 0.975])
    return float(low), float(high)


def chance_of_difference(differences: np.ndarray, *, seed: int = 0) -> float:
    """Return the two-sided p-value for (P,) paired differences with mean 0, by random sign flips.

    (1 + flips at least as far from 0) / (1 + flips): the permutation test of a paired design (Fisher 1935).
    """
    differences = np.asarray(differences, np.float64)
    found = abs(float(differences.mean()))
    if not differences.any():
        return 1.0
    draw, extreme = np.random.default_rng(seed), 0
    for _ in range(_RESAMPLES // _CHUNK):
        signs = draw.integers(0, 2, (_CHUNK, len(differences))) * 2 - 1
        # A mean that equals the observed one up to rounding counts.
        extreme += int((np.abs((signs * differences).mean(1)) >= found * (1 - 1e-12)).sum())
    return (1 + extreme) / (1 + _RESAMPLES)
