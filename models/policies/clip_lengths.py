"""Supported numbers of frames of a family's clips."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipLengths:
    """Clips of u n + r frames."""

    every: int
    """u, the difference between successive lengths."""
    beyond: int = 1
    """r."""
    least: int = 1
    """Frames of the shortest clip."""
    most: int | None = None
    """Frames of the longest clip; None: there is no limit."""
    seconds: str = ""
    """The limits in seconds, for messages."""

    def __contains__(self, frames: int) -> bool:
        return self._within(frames) and frames % self.every == self.beyond % self.every

    def __str__(self) -> str:
        bounds = "" if self.most is None else f", {self.least} to {self.most} of them ({self.seconds})"
        return f"{self.every} n + {self.beyond} frames{bounds}"

    def nearest(self, frames: int) -> str:
        """Return the supported lengths nearest to an unsupported one, as a sentence without its period."""
        below = frames - (frames - self.beyond) % self.every
        ends = [self.least, *([] if self.most is None else [self.most])]
        found = [each for each in (below, below + self.every) if self._within(each)] or [
            min(ends, key=lambda n: abs(n - frames))
        ]
        return f"The nearest {'are' if len(found) > 1 else 'is'} {' and '.join(map(str, found))}"

    def _within(self, frames: int) -> bool:
        return frames >= self.least and (self.most is None or frames <= self.most)
