"""Supported numbers of frames of a family's clips."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipLengths:
    """Clips of u n + 1 frames."""

    every: int
    """u, the difference between successive lengths."""

    def __contains__(self, frames: int) -> bool:
        return frames >= 1 and frames % self.every == 1

    def __str__(self) -> str:
        return f"{self.every} n + 1 frames"

    def nearest(self, frames: int) -> str:
        """Return the supported lengths nearest to an unsupported one, as a sentence without its period."""
        below = frames - (frames - 1) % self.every
        return f"The nearest are {below} and {below + self.every}"
