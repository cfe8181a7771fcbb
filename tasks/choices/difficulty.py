"""Pools of prompts by difficulty: around a target reward, or from easy to hard by rewards or levels of a column.

Rewards near the middle of their range have the largest spread within a group, and so the largest advantages: the
variance of a reward of 0 or 1 with success rate p is p (1 - p). From easy to hard is curriculum learning (Bengio et
al., 2009).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import PositiveInt

from flowmill.configs.option_types import Share
from flowmill.tasks.choices.base import BySource, Candidate, Choice, Draw, oldest_first


@dataclass(frozen=True, kw_only=True)
class Difficulty(BySource):
    """Prompts are sorted by the rewards of their last group and cut into pools of equal size."""

    target: float | None = None
    """Weighted mean reward; the first pool has those closest to it, and groups of equal rewards come last."""
    epochs: PositiveInt | None = None
    """Instead of a target: epochs from the pool of the highest mean rewards to that of the lowest."""
    level: str | None = None
    """With ``epochs``: the column of prompts with their level, a number, lower for easier ones, instead of rewards."""
    pools: PositiveInt = 4
    """Number of pools."""
    fresh: Share = 0.25
    """Share of an epoch for prompts without rewards, as long as there are some."""

    def __post_init__(self) -> None:
        if (self.target is None) == (self.epochs is None):
            raise ValueError("it needs either 'target', a mean reward, or 'epochs', from easy to hard.")
        if self.level is not None and self.epochs is None:
            raise ValueError(f"level is '{self.level}', but only acts with 'epochs', from easy to hard.")

    def pick(self, own: Sequence[int], count: int, draw: Draw) -> list[Choice]:
        """Return new prompts, then those of the target pool, then those of the pools next to it."""
        candidates = draw.candidates
        rated = [index for index in own if self.level is not None or candidates[index].mean is not None]
        # Around a target, groups of equal rewards are a pool of their own, after the others.
        flat = {index for index in rated if self.target is not None and candidates[index].spread == 0}
        graded = [index for index in rated if index not in flat]
        ranked = sorted(graded, key=lambda index: self._rank(candidates[index]))
        pool = {index: place * self.pools // len(ranked) for place, index in enumerate(ranked)}
        pool |= dict.fromkeys(flat, self.pools)
        first = 0 if self.epochs is None else min(self.pools - 1, (draw.epoch - 1) * self.pools // self.epochs)
        seen = sorted(oldest_first(rated, draw), key=lambda index: abs(pool[index] - first))
        unknown = oldest_first([index for index in own if index not in pool], draw)
        fresh = max(min(len(unknown), round(self.fresh * count)), count - len(seen))
        reasons = {index: f"{self._mean_text(candidates[index])}, pool {pool[index] + 1}" for index in seen}
        return [
            *(Choice(index, "no rewards known") for index in unknown[:fresh]),
            *(Choice(index, reasons[index]) for index in seen[: count - fresh]),
        ]

    def _rank(self, candidate: Candidate) -> tuple[float, float]:
        if self.level is not None:
            return level_of(candidate.metadata, self.level), 0.0
        mean, spread = candidate.mean or 0.0, candidate.spread or 0.0
        return -mean if self.target is None else abs(mean - self.target), -spread

    def _mean_text(self, candidate: Candidate) -> str:
        if self.level is not None:
            return f"{self.level} {level_of(candidate.metadata, self.level):g}"
        return f"mean {candidate.mean:.4g} and spread {candidate.spread:.4g} in epoch {candidate.scored}"


def level_of(metadata: Mapping[str, Any], column: str) -> float:
    """Return the level of a prompt; raise ValueError if its column has no finite number."""
    value = metadata.get(column)
    try:
        level = math.nan if value is None or isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        level = math.nan
    if not math.isfinite(level):
        raise ValueError(f"its column '{column}' is {value!r}, no number")
    return level
