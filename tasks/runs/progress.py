"""Progress messages and working times of stages."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import psutil

#: Number of recent spans of work, of all stages, for the typical time.
_LATELY = 64


class Reporter(Protocol):
    """Shows progress to the user or in a log."""

    def progress(self, stage: str, epoch: int, done: int, total: int, detail: str = "") -> None:
        """Show the progress of a stage of an epoch; ``detail`` is a short figure such as the current reward.

        For whole epochs ``stage`` is "pipeline", or "found" if the training of an epoch was already committed.
        """

    def message(self, text: str) -> None:
        """Show one line."""


class Silent:
    """A reporter without output."""

    def progress(self, stage: str, epoch: int, done: int, total: int, detail: str = "") -> None:
        """Do nothing."""

    def message(self, text: str) -> None:
        """Do nothing."""


class Ledger:
    """Working times of the stages in this process; stages may overlap."""

    def __init__(self) -> None:
        self._spans: list[tuple[str, float, float]] = []
        self._lock = threading.Lock()
        self.started = time.monotonic()
        self._waited, self._measured = 0.0, self.started

    @contextmanager
    def work(self, stage: str) -> Iterator[None]:
        """Count the time inside as work of a stage."""
        start = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._spans.append((stage, start, time.monotonic()))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside as waiting for rewards, with nothing else to do."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._waited += time.monotonic() - start

    def waited_share(self) -> float:
        """Return the share of time spent ``waiting`` since the last call, or since the start."""
        now = time.monotonic()
        share = self._waited / max(now - self._measured, 1e-9)
        self._waited, self._measured = 0.0, now
        return share

    def seconds(self, stage: str) -> float:
        """Return the seconds a stage worked."""
        return sum(end - start for name, start, end in self._spans if name == stage)

    def times(self, stage: str) -> int:
        """Return how often a stage worked."""
        return sum(name == stage for name, _, _ in self._spans)

    def typical(self, stage: str) -> float:
        """Return the mean seconds per span of a stage's recent work; infinity if there is none."""
        times = [end - start for name, start, end in self._spans[-_LATELY:] if name == stage]
        return sum(times) / len(times) if times else math.inf

    def stages(self) -> list[str]:
        """Return the stages that worked, in order of first work."""
        return list(dict.fromkeys(name for name, _, _ in self._spans))

    def busy(self) -> float:
        """Return the seconds in which at least one stage worked."""
        total, reach = 0.0, float("-inf")
        for _, start, end in sorted(self._spans, key=lambda span: span[1]):
            total += max(0.0, end - max(start, reach))
            reach = max(reach, end)
        return total

    def startup(self) -> float:
        """Return the seconds from the start of the process to this ledger."""
        before = time.time() - float(psutil.Process().create_time()) - (time.monotonic() - self.started)
        return max(0.0, before)

    def overhead(self) -> float:
        """Return the seconds of this ledger in which no stage worked: orchestration, commits, tracking."""
        return max(0.0, time.monotonic() - self.started - self.busy())
