"""Advantages as their formulas read, in python floats."""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Sequence


def spread(values: Sequence[float], *, epsilon: float, floor: str, unbiased: bool) -> float:
    """Return the divisor of some rewards."""
    std = statistics.stdev(values) if unbiased else statistics.pstdev(values)
    return std + epsilon if floor == "add" else max(std, epsilon)


def gdpo(
    rewards: Sequence[Sequence[float]],
    weights: Sequence[float],
    groups: Sequence[Hashable],
    penalty: Sequence[float],
    **divisor: float | str | bool,
) -> list[float]:
    """Return the sum over rewards of |w| (x - mean) / spread, x = (w r - P) / |w|, in each group, once more by all."""
    total = [0.0] * len(groups)
    for values, weight in zip(rewards, weights, strict=True):
        less = [(weight * r - p) / abs(weight) for r, p in zip(values, penalty, strict=True)]
        for group in set(groups):
            members = [i for i, g in enumerate(groups) if g == group]
            own = [less[i] for i in members]
            scale = spread(own, **divisor)  # type: ignore[arg-type]
            for i in members:
                total[i] += abs(weight) * (less[i] - statistics.fmean(own)) / scale
    mean, scale = statistics.fmean(total), spread(total, **divisor)  # type: ignore[arg-type]
    return [(value - mean) / scale for value in total]


def running(
    rewards: Sequence[float],
    groups: Sequence[int],
    history: Sequence[Sequence[float]],
    *,
    buffer: int,
    min_count: int,
    **divisor: float | str | bool,
) -> list[float]:
    """Return each reward by the mean and spread of its prompt's last ``buffer`` rewards, or of the epoch's."""
    advantages = []
    for reward, group in zip(rewards, groups, strict=True):
        own = [*history[group], *(r for r, g in zip(rewards, groups, strict=True) if g == group)][-buffer:]
        pool = own if len(own) >= min_count else list(rewards)
        advantages.append((reward - statistics.fmean(pool)) / spread(pool, **divisor))  # type: ignore[arg-type]
    return advantages
