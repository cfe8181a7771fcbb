"""Confidence intervals of means over prompts, and a test of falls. Pure: arrays in, numbers out, float64 inside.

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


#: Minimum prompts for an interval: below, equal values are too likely by chance.
FEWEST = 5
#: Lower tail of the studentized bootstrap that is compared with Student's t.
_TAIL = 0.01
#: Standard errors below this share of the values are rounding.
_ROUNDING = 1e-12
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


def mean_with_interval(
    values: np.ndarray, *, bounds: tuple[float, float] = (-math.inf, math.inf), seed: int = 0
) -> Estimate:
    """Return the mean of (P,) prompts with its 95 % interval, if there are at least ``FEWEST`` prompts.

    If all values are 0 or 1, or at either bound, the interval is Wilson's (1927), which has a width for equal values
    too. Otherwise it is the union of the intervals of Student's t and of the studentized bootstrap (Efron and
    Tibshirani 1993, 12.5): the first is accurate for symmetric values, the second for skewed ones. It is clipped to the
    bounds, which keeps its coverage because no mean lies outside. For equal values within bounds it is Wilson's too:
    values at the bounds have the largest variance around their mean.

    Args:
        values: (P,) one per prompt.
        bounds: lowest and highest possible value, infinite where there is none; ignored if a value lies outside.
        seed: seed of the resamples.
    """
    # The import of scipy.stats takes longer than the other work of 'flowmill status'.
    from scipy.special import stdtrit

    values = np.asarray(values, np.float64)
    mean, count = float(values.mean()), len(values)
    if count < FEWEST:
        return Estimate(mean=mean, low=None, high=None)
    least, most = bounds if bounds[0] <= values.min() and values.max() <= bounds[1] else (-math.inf, math.inf)
    error = float(values.std(ddof=1)) / math.sqrt(count)
    ends = (least, most) if math.isfinite(most - least) else (0.0, 1.0)
    if bool(np.isin(values, ends).all()) or (error == 0 and math.isfinite(most - least)):
        share = (mean - ends[0]) / (ends[1] - ends[0])
        low, high = (ends[0] + (ends[1] - ends[0]) * end for end in _wilson(share, count))
        return Estimate(mean=mean, low=low, high=high)
    below, above = np.quantile(_studentized(values, seed), [0.025, 0.975]) if error > 0 else (0.0, 0.0)
    t = float(stdtrit(count - 1, 0.975))
    estimate = Estimate(mean=mean, low=mean - max(t, float(above)) * error, high=mean + max(t, -float(below)) * error)
    return estimate.within(least, most)


def _wilson(share: float, count: int) -> tuple[float, float]:
    """Return Wilson's interval of a share of ``count`` draws."""
    middle = share + _Z**2 / (2 * count)
    half = _Z * math.sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2))
    # Of all or none one end is that share, up to rounding.
    return max(0.0, (middle - half) / (1 + _Z**2 / count)), min(1.0, (middle + half) / (1 + _Z**2 / count))


def _studentized(values: np.ndarray, seed: int) -> np.ndarray:
    """Return (mean* - mean) / error* of the resamples that are not constant, (R,)."""
    draw, count = np.random.default_rng(seed), len(values)
    ratios = []
    for _ in range(_RESAMPLES // _CHUNK):
        drawn = values[draw.integers(0, count, (_CHUNK, count))]
        error = drawn.std(1, ddof=1) / math.sqrt(count)
        varied = error > _ROUNDING * np.abs(values).max()
        ratios.append((drawn.mean(1)[varied] - values.mean()) / error[varied])
    return np.concatenate(ratios)


def chance_of_fall(differences: np.ndarray, *, most: float = math.inf, seed: int = 0) -> float:
    """Return the one-sided p-value for (P,) paired differences with a mean of 0 or more; 1 for too few.

    The larger of two. One is that of Student's t, with the statistic divided by how much heavier the lower tail of the
    studentized bootstrap is, at its 1 % quantile: many small falls with a few large gains have a heavy one. The other
    is that of Student's t with one more prompt that gains the most possible, as gains may be too rare to be seen.

    Args:
        differences: (P,) after minus before, one per prompt.
        most: the largest possible gain; if infinite, three times the largest distance from the mean is taken.
        seed: seed of the resamples.
    """
    from scipy.special import stdtr, stdtrit

    differences = np.sort(np.asarray(differences, np.float64))
    if len(differences) < FEWEST or not differences.any():
        return 1.0
    gain = most if math.isfinite(most) else 3 * float(np.abs(differences - differences.mean()).max())
    with_gain = float(stdtr(len(differences), _t(np.append(differences, gain))))
    statistic, freedom = _t(differences), len(differences) - 1
    if statistic >= 0 or math.isinf(statistic):
        return max(with_gain, float(stdtr(freedom, statistic)))
    heavier = float(np.quantile(_studentized(differences, seed), _TAIL) / stdtrit(freedom, _TAIL))
    return max(with_gain, float(stdtr(freedom, statistic / max(1.0, heavier))))


def _t(values: np.ndarray) -> float:
    """Return the mean in standard errors; infinite for values that are equal up to rounding."""
    error = float(values.std(ddof=1)) / math.sqrt(len(values))
    mean = float(values.mean())
    return mean / error if error > _ROUNDING * np.abs(values).max() else math.copysign(math.inf, mean)
