"""How certain a mean over prompts is, and a difference of two. Pure: arrays in, numbers out, float64 inside.

Prompts are what is drawn: images of one prompt are not independent, so each prompt counts with its mean.

Legend: P prompts, R resamples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

#: Resamples, and those that are held in memory at a time.
_RESAMPLES, _CHUNK = 10_000, 500


#: Prompts below which no interval is given: none that is short enough to say something holds the mean in 95 % of cases.
FEWEST = 20
#: The quantiles' distance from the middle, of a standard normal.
_Z = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean with what is known of it."""

    mean: float
    """Mean over prompts."""
    low: float | None
    """Lower end of its 95 % interval; None: there are too few prompts for one."""
    high: float | None
    """Upper end."""

    def within(self, least: float, most: float) -> Estimate:
        """Return it cut at the ends of what a mean can be; one that lies beyond them is left as it is."""
        if self.low is None or self.high is None or not least <= self.mean <= most:
            return self
        return replace(self, low=max(self.low, least), high=min(self.high, most))


def mean_with_interval(values: np.ndarray, *, bounds: tuple[float, float] | None = None, seed: int = 0) -> Estimate:
    """Return the mean of (P,) prompts with its 95 % interval, from ``FEWEST`` prompts on.

    Of values that are all 0 or 1, or at either bound, it is Wilson's (1927), which has a width where all are
    equal too. Of others it is what Student's t and the studentized bootstrap (Efron and Tibshirani 1993, 12.5) cover
    together: the first holds where values are spread evenly, the second where they lean to one side. It is cut at the
    bounds: no mean lies beyond, so the interval holds it as often. Of equal values within bounds it is Wilson's too: no
    values within bounds have a larger variance about their mean than those at the bounds.

    Args:
        values: (P,) one per prompt.
        bounds: lowest and highest value there can be; they are left out of account where a value lies beyond.
        seed: of the resamples.
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
    """Return the interval of a share of ``count`` draws."""
    middle = share + _Z**2 / (2 * count)
    half = _Z * math.sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2))
    return (middle - half) / (1 + _Z**2 / count), (middle + half) / (1 + _Z**2 / count)


def _student(freedom: int) -> float:
    """Return Student's 97.5 % quantile by its expansion (Abramowitz and Stegun 26.7.5), right to 1e-4 from 9 on."""
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
    """Return the two-sided p-value of (P,) paired differences having the mean 0, by random flips of their signs.

    (1 + flips at least as far from 0) / (1 + flips): the permutation test of a paired design (Fisher 1935).
    """
    differences = np.asarray(differences, np.float64)
    found = abs(float(differences.mean()))
    if not differences.any():
        return 1.0
    draw, extreme = np.random.default_rng(seed), 0
    for _ in range(_RESAMPLES // _CHUNK):
        signs = draw.integers(0, 2, (_CHUNK, len(differences))) * 2 - 1
        # What equals the found one but for rounding counts.
        extreme += int((np.abs((signs * differences).mean(1)) >= found * (1 - 1e-12)).sum())
    return (1 + extreme) / (1 + _RESAMPLES)
