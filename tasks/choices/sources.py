"""Shares of prompt sources that follow their progress.

The absolute change of a source's mean reward shows that the policy learns, or forgets, on it (teacher-student
curriculum learning, arXiv 1707.00183).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from pydantic import PositiveInt

from flowmill.configs.option_types import PositiveShare
from flowmill.tasks.choices.base import BySource, Choice, Draw, oldest_first, since


@dataclass(frozen=True, kw_only=True)
class Sources(BySource):
    """Prompts of each source are drawn in turn; the sources' shares are fixed, or their weights times progress."""

    follow: Literal["progress", "weights"] = "progress"
    """Shares in proportion to weight times progress, or to the weights alone."""
    window: PositiveInt = 4
    """Progress is the distance between the mean reward of the last and of the previous so many epochs."""
    floor: PositiveShare = 0.2
    """Progress counts as at least this share of the largest one."""

    def weights(self, draw: Draw) -> list[float]:
        """Return the shares; the configured ones until every source has two windows."""
        means = [list(draw.means.get(name, ())) for name in draw.weights]
        if self.follow == "weights" or any(len(each) < 2 * self.window for each in means):
            return list(draw.weights.values())
        progress = [abs(fmean(each[-self.window :]) - fmean(each[-2 * self.window : -self.window])) for each in means]
        most = max(progress) or 1.0
        shares = [max(each / most, self.floor) for each in progress]
        return [weight * share for weight, share in zip(draw.weights.values(), shares, strict=True)]

    def pick(self, own: Sequence[int], count: int, draw: Draw) -> list[Choice]:
        """Return the prompts that wait longest."""
        return [
            Choice(index, f"{count} of source '{draw.candidates[index].source}', {since(draw.candidates[index])}")
            for index in oldest_first(own, draw)[:count]
        ]
