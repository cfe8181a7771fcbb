"""Scores several requests in common calls, from a bounded queue.
Legend: B samples of a request."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from models.rewards.base import Batch, Reward, Scores, joined
from models.rewards.invocation import Handling, score


class Metrics:
    """Metrics of one server, in a separate registry."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        of = self._registry
        self.requests = Counter(
            "flowmill_reward_requests", "Requests by status of the answer.", ["status"], registry=of
        )
        self.samples = Counter("flowmill_reward_samples", "Samples handed to the reward.", registry=of)
        self.seconds = Histogram("flowmill_reward_call_seconds", "Seconds of a call of the reward.", registry=of)
        self.rows = Histogram(
            "flowmill_reward_call_samples", "Samples of a call.", buckets=[2**n for n in range(11)], registry=of
        )
        self.waiting = Gauge("flowmill_reward_waiting_samples", "Samples that wait or are being scored.", registry=of)

    def scored(self, rows: int, seconds: float) -> None:
        """Count a call."""
        self.samples.inc(rows)
        self.seconds.observe(seconds)
        self.rows.observe(rows)

    def text(self) -> bytes:
        """Return all in Prometheus' text format."""
        return generate_latest(self._registry)


class BusyError(Exception):
    """The queue is full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of calls and of the queue."""

    batch_size: int | None = None
    """Rows per call of the reward; None: the reward's own."""
    join: int = 64
    """Samples of several requests that are scored together."""
    wait_s: float = 0.005
    """Seconds a request waits for others to join it."""
    waiting: int = 4096
    """Samples that may wait; a request beyond that is refused, and the client retries."""


@dataclass(frozen=True, slots=True)
class _Job:
    batch: Batch
    done: asyncio.Future[Scores]


class Batcher:
    """Calls one reward for all requests, one call after the other."""

    def __init__(self, reward: Reward, name: str, limits: Limits, metrics: Metrics) -> None:
        self._reward, self._name, self._limits, self._metrics = reward, name, limits, metrics
        self._jobs: asyncio.Queue[_Job] = asyncio.Queue()
        self._waiting = 0
        self._numbers = 0

    async def submit(self, batch: Batch) -> Scores:
        """Return the scores of a request's samples. Raises BusyError if too many samples wait already; FlowmillError if
        the reward failed for them; OSError if the reward raised one, which may be temporary."""
        if self._waiting and self._waiting + len(batch) > self._limits.waiting:
            raise BusyError(f"{self._waiting} samples wait")
        # A groupwise reward treats the samples of one request as one group.
        self._numbers += 1
        job = _Job(replace(batch, groups=[str(self._numbers)] * len(batch)), asyncio.get_running_loop().create_future())
        self._note(len(batch))
        try:
            self._jobs.put_nowait(job)
            return await job.done
        finally:
            self._note(-len(batch))

    async def run(self) -> None:
        """Score requests until cancelled."""
        while True:
            jobs = await self._gather()
            for alike in _alike(jobs):
                await self._answer(alike)

    async def _gather(self) -> list[_Job]:
        """Return the next request, and those that arrive within ``wait_s`` after it."""
        jobs = [await self._jobs.get()]
        until = time.monotonic() + self._limits.wait_s
        while sum(len(job.batch) for job in jobs) < self._limits.join:
            try:
                jobs.append(await asyncio.wait_for(self._jobs.get(), until - time.monotonic()))
            except TimeoutError:
                break
        return [job for job in jobs if not job.done.done()]

    async def _answer(self, jobs: Sequence[_Job]) -> None:
        """Score requests together, or each alone if that fails; errors go to the requests."""
        (outcome,) = await asyncio.gather(_apart(self._score, jobs), return_exceptions=True)
        if not isinstance(outcome, BaseException):
            start = 0
            for job in jobs:
                stop = start + len(job.batch)
                notes = None if outcome.notes is None else list(outcome.notes[start:stop])
                if not job.done.done():
                    job.done.set_result(Scores(outcome.values[start:stop], notes))
                start = stop
        elif len(jobs) > 1:
            for job in jobs:
                await self._answer([job])
        elif not jobs[0].done.done():
            jobs[0].done.set_exception(outcome)

    def _score(self, jobs: Sequence[_Job]) -> Scores:
        batch, begun = joined([job.batch for job in jobs]), time.perf_counter()
        try:
            return score(self._reward, self._name, batch, Handling(frames="clip", batch_size=self._limits.batch_size))
        finally:
            self._metrics.scored(len(batch), time.perf_counter() - begun)

    def _note(self, change: int) -> None:
        self._waiting += change
        self._metrics.waiting.set(self._waiting)


def _apart(work: Callable[[Sequence[_Job]], Scores], jobs: Sequence[_Job]) -> asyncio.Future[Scores]:
    """Return the result of work in a daemon thread."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Scores] = loop.create_future()

    def deliver(outcome: Scores | BaseException) -> None:
        if done.done():
            return
        if isinstance(outcome, BaseException):
            done.set_exception(outcome)
        else:
            done.set_result(outcome)

    def score_batch() -> None:
        outcome: Scores | BaseException
        try:
            outcome = work(jobs)
        except BaseException as error:  # noqa: BLE001 - the caller receives it
            outcome = error
        with contextlib.suppress(RuntimeError):  # the server is gone
            loop.call_soon_threadsafe(deliver, outcome)

    threading.Thread(target=score_batch, name="score", daemon=True).start()
    return done


def _alike(jobs: Sequence[_Job]) -> list[list[_Job]]:
    """Return requests by the shape and dtype of their samples and whether they have references, in order."""
    found: dict[tuple[object, ...], list[_Job]] = {}
    for job in jobs:
        about = (job.batch.media.shape[1:], job.batch.media.dtype, bool(job.batch.references))
        found.setdefault(about, []).append(job)
    return list(found.values())
