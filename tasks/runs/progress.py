"""Progress messages and working times of stages."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
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
        # Sums, not spans: a run of many epochs has many spans.
        self._seconds: dict[str, float] = {}
        self._times: Counter[str] = Counter()
        self._lately: deque[tuple[str, float]] = deque(maxlen=_LATELY)
        self._busy, self._working, self._since = 0.0, 0, 0.0
        self._lock = threading.Lock()
        self.started = time.monotonic()
        self._waited, self._measured = 0.0, self.started

    @contextmanager
    def work(self, stage: str) -> Iterator[None]:
        """Count the time inside as work of a stage."""
        with self._lock:
            start = time.monotonic()
            self._since = self._since if self._working else start
            self._working += 1
        try:
            yield
        finally:
            with self._lock:
                end = time.monotonic()
                self._working -= 1
                self._busy += 0.0 if self._working else end - self._since
                self._seconds[stage] = self._seconds.get(stage, 0.0) + end - start
                self._times[stage] += 1
                self._lately.append((stage, end - start))

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
        return self._seconds.get(stage, 0.0)

    def times(self, stage: str) -> int:
        """Return how often a stage worked."""
        return self._times[stage]

    def typical(self, stage: str) -> float:
        """Return the mean seconds per span of a stage's recent work; infinity if there is none."""
        with self._lock:
            times = [seconds for name, seconds in self._lately if name == stage]
        return sum(times) / len(times) if times else math.inf

    def stages(self) -> list[str]:
        """Return the stages that worked, in the order in which they first finished work."""
        return list(self._seconds)

    def busy(self) -> float:
        """Return the seconds in which at least one stage worked."""
        with self._lock:
            return self._busy + (time.monotonic() - self._since if self._working else 0.0)

    def startup(self) -> float:
        """Return the seconds from the start of the process to this ledger."""
        before = time.time() - float(psutil.Process().create_time()) - (time.monotonic() - self.started)
        return max(0.0, before)

    def overhead(self) -> float:
        """Return the seconds of this ledger in which no stage worked: orchestration, commits, tracking."""
        return max(0.0, time.monotonic() - self.started - self.busy())
