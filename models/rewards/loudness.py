"""Loudness of a sound, without a model: for monitors, and to try a model that generates sound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from flowmill.models.rewards.base import Metadata, Needs, Scores

#: Largest value of a 16-bit sound; louder samples were clipped.
_FULL = 32767 / 32768


@dataclass(frozen=True, slots=True, kw_only=True)
class Loudness:
    """The level of a sound in decibels of full scale, 20 log10 of its root mean square over samples and channels. With
    a target it is minus the distance to the target."""

    needs: ClassVar[Needs] = Needs(media="sounds")

    target: float | None = None
    """Level with the best score; without it a louder sound scores higher."""
    floor: float = -80.0
    """Level of silence, below which levels are equal."""

    def __post_init__(self) -> None:
        """Check the options; raise ValueError if a level is out of range."""
        if not self.floor < 0 or not self.floor <= (0 if self.target is None else self.target) <= 0:
            raise ValueError(f"floor is {self.floor} and target {self.target}; it must be floor <= target <= 0.")

    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Metadata) -> Scores:
        """Return one score per (N, C) float32 sound, with its level and the share of clipped samples as a note."""
        power = np.square(media.astype(np.float64)).mean(axis=(1, 2))
        levels = 10 * np.log10(np.maximum(power, 10 ** (self.floor / 10)))
        cut = (np.abs(media) >= _FULL).mean(axis=(1, 2))
        scores = levels if self.target is None else -np.abs(levels - self.target)
        notes = [f"{level:.1f} dBFS, {share:.1%} cut" for level, share in zip(levels, cut, strict=True)]
        return Scores(scores.astype(np.float32), notes)
