"""How certain a mean over prompts is, and a difference of two. Pure: arrays in, numbers out, float64 inside.

Prompts are what is drawn: images of one prompt are not independent, so each prompt counts with its mean.

Legend: P prompts, R resamples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

#: Resamples, and those that are held in memory at a time.
_RESAMPLES, _CHUNK = 10_000, 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean with what is known of it."""

    mean: float
    """Mean over prompts."""
    low: float
    """Lower end of its 95 % interval."""
    high: float
    """Upper end."""


def mean_with_interval(values: np.ndarray, *, seed: int = 0) -> Estimate:
    """Return the mean of (P,) prompts with its 95 % percentile bootstrap interval (Efron 1979)."""
    values = np.asarray(values, np.float64)
    draw = np.random.default_rng(seed)
    means = np.concatenate(
        [values[draw.integers(0, len(values), (_CHUNK, len(values)))].mean(1) for _ in range(_RESAMPLES // _CHUNK)]
    )
    low, high = np.quantile(means, [0.025, 0.975])
    return Estimate(mean=float(values.mean()), low=float(low), high=float(high))


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
