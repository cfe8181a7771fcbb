"""Heartbeats: every rank reports its work, and a watcher detects silent or stuck ranks."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from flowmill.tasks.runtime.kv_store import KeyValueStore

_BEAT_S = 1.0
_START_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """The report of one rank."""

    number: int
    """Sequence number of the report."""
    place: str
    """The work in progress."""
    still: float
    """Seconds since that changed."""
    waiting: bool
    """Whether it waits for other ranks."""


class HeartbeatSender:
    """Tracks and reports the work of this rank."""

    def __init__(self) -> None:
        self._place, self._changed = "starting", time.monotonic()
        self._waiting = self._idle = False

    def at(self, place: str) -> None:
        """Set the work in progress."""
        self._place, self._changed = place, time.monotonic()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark this rank as waiting for others while inside."""
        self._waiting = True
        try:
            yield
        finally:
            self._waiting, self._changed = False, time.monotonic()

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Mark this rank as idle while inside, without a time limit."""
        self._place, self._idle = "nothing: it waits for orders", True
        try:
            with self.waiting():
                yield
        finally:
            self._idle = False

    def beat(self, number: int) -> Heartbeat:
        """Return the current report."""
        still = 0.0 if self._idle else time.monotonic() - self._changed
        return Heartbeat(number=number, place=self._place, still=still, waiting=self._waiting)

    def start(self, board: KeyValueStore, rank: int, world: int, send: Callable[[dict[int, Heartbeat]], None]) -> None:
        """Start sending reports; the first rank forwards those of all ranks."""

        def run() -> None:
            number = 0
            while True:
                number += 1
                board.post(str(rank), json.dumps(asdict(self.beat(number))))
                if rank == 0:
                    texts = {other: board.find(str(other)) for other in range(world)}
                    send({other: Heartbeat(**json.loads(text)) for other, text in texts.items() if text is not None})
                time.sleep(_BEAT_S)

        threading.Thread(target=run, daemon=True, name="pulse").start()


class Watch:
    """Detects a hanging rank."""

    def __init__(self, limit: float, *, world: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Start to listen.

        Args:
            limit: seconds without a report or without progress after which a rank hangs; newly started ranks have at
                least a minute.
            world: number of ranks.
            clock: returns the time in seconds.
        """
        self._limit = limit
        self._world = world
        self._clock = clock
        self._began = clock()
        self._heard = self._began + max(0.0, _START_S - limit)
        self._beats: dict[int, tuple[Heartbeat, float]] = {}

    def heard(self, beats: Mapping[int, Heartbeat]) -> None:
        """Receive reports of ranks."""
        self._heard = self._clock()
        for rank, beat in beats.items():
            if rank not in self._beats or beat.number != self._beats[rank][0].number:
                self._beats[rank] = (beat, self._heard)

    def hanging(self) -> str | None:
        """Return a message on the hanging rank and its last work, None if no rank hangs."""
        now = self._clock()
        if now - self._heard > self._limit:
            return f"rank 0 has said nothing for {now - self._heard:.0f} s; {self._last(0)}"
        if len(self._beats) < self._world and now - self._began > max(self._limit, _START_S):
            absent = min(set(range(self._world)) - set(self._beats))
            return f"rank {absent} has said nothing since it was started {now - self._began:.0f} s ago"
        silent = {rank: now - since for rank, (_, since) in self._beats.items() if now - since > self._limit}
        if silent:
            rank = max(silent, key=lambda each: silent[each])
            return f"rank {rank} has said nothing for {silent[rank]:.0f} s; {self._last(rank)}"
        still = {rank: beat for rank, (beat, _) in self._beats.items() if beat.still > self._limit}
        busy = {rank: beat.still for rank, beat in still.items() if not beat.waiting}
        if busy:
            rank = max(busy, key=lambda each: busy[each])
            return f"rank {rank} has not moved on for {busy[rank]:.0f} s; {self._last(rank)}"
        if still and len(still) == len(self._beats):
            return f"all ranks wait for each other since {min(b.still for b in still.values()):.0f} s; {self._last(0)}"
        return None

    def _last(self, rank: int) -> str:
        beat = self._beats.get(rank)
        return "it never said where it was" if beat is None else f"it was last at: {beat[0].place}"
