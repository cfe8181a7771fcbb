"""Answers several requests of a server with common calls of its reward, from a bounded queue."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from flowmill.models.rewards.base import Batch, Scores


class Metrics:
    """Metrics of one server, in a separate registry."""

    def __init__(self) -> None:
        self._registry = of = CollectorRegistry()
        name = "flowmill_reward"
        self.requests = Counter(f"{name}_requests", "Requests by status of the answer.", ["status"], registry=of)
        self.samples = Counter(f"{name}_samples", "Samples handed to the reward.", registry=of)
        self.seconds = Histogram(f"{name}_call_seconds", "Seconds of a call of the reward.", registry=of)
        buckets = [2**n for n in range(11)]
        self.rows = Histogram(f"{name}_call_samples", "Samples of a call.", buckets=buckets, registry=of)
        self.waiting = Gauge(f"{name}_waiting_samples", "Samples that wait or are being answered.", registry=of)

    def called(self, rows: int, seconds: float) -> None:
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

    join: int = 64
    """Samples of several requests that are answered together."""
    wait_s: float = 0.005
    """Seconds a request waits for others to join it."""
    waiting: int = 4096
    """Samples that may wait; a request beyond that is refused, and the client retries."""


@dataclass(frozen=True, slots=True)
class _Job:
    work: Batch
    done: asyncio.Future[Scores]


class Batcher:
    """Calls one reward for all requests, one call after the other."""

    def __init__(
        self, call: Callable[[Sequence[Batch]], Sequence[Scores]], *, limits: Limits, metrics: Metrics
    ) -> None:
        """Bind to a reward. ``call``: returns the scores of requests whose samples have one shape and dtype."""
        self._call, self._limits, self._metrics = call, limits, metrics
        self._queue: asyncio.Queue[asyncio.Future[Scores]] = asyncio.Queue()
        self._works: dict[asyncio.Future[Scores], Batch] = {}
        self._waiting = 0

    async def submit(self, work: Batch) -> Scores:
        """Return the answer to a request. Raises BusyError if too many samples wait already; errors of the reward for
        this request. Cancelled, it takes the samples out of the queue."""
        if self._waiting and self._waiting + len(work) > self._limits.waiting:
            raise BusyError(f"{self._waiting} samples wait")
        done: asyncio.Future[Scores] = asyncio.get_running_loop().create_future()
        self._works[done] = work
        self._note(len(work))
        try:
            self._queue.put_nowait(done)
            return await done
        finally:
            del self._works[done]
            self._note(-len(work))

    async def run(self) -> None:
        """Answer requests until cancelled."""
        while True:
            groups: dict[Hashable, list[_Job]] = {}
            for job in await self._gather():
                groups.setdefault(_alike(job.work), []).append(job)
            for jobs in groups.values():
                await self._answer(jobs)

    async def _gather(self) -> list[_Job]:
        """Return the next request, and those that arrive within ``wait_s`` after it."""
        requests = [await self._queue.get()]
        until = time.monotonic() + self._limits.wait_s
        while sum(len(self._works.get(done, ())) for done in requests) < self._limits.join:
            try:
                requests.append(await asyncio.wait_for(self._queue.get(), until - time.monotonic()))
            except TimeoutError:
                break
        return [_Job(self._works[done], done) for done in requests if not done.done()]

    async def _answer(self, jobs: Sequence[_Job]) -> None:
        """Answer requests together, or each alone if that fails; errors go to the requests."""
        # Callers may have gone during the calls before.
        jobs = [job for job in jobs if not job.done.done()]
        if not jobs:
            return
        works = [job.work for job in jobs]
        (outcome,) = await asyncio.gather(_apart(lambda: self._timed(works)), return_exceptions=True)
        if not isinstance(outcome, BaseException):
            for job, answer in zip(jobs, outcome, strict=True):
                if not job.done.done():
                    job.done.set_result(answer)
        elif len(jobs) > 1:
            for job in jobs:
                await self._answer([job])
        elif not jobs[0].done.done():
            jobs[0].done.set_exception(outcome)

    def _timed(self, works: Sequence[Batch]) -> Sequence[Scores]:
        begun = time.perf_counter()
        try:
            return self._call(works)
        finally:
            self._metrics.called(sum(map(len, works)), time.perf_counter() - begun)

    def _note(self, change: int) -> None:
        self._waiting += change
        self._metrics.waiting.set(self._waiting)


def _alike(batch: Batch) -> Hashable:
    """Return shape and dtype of samples, and whether they have references."""
    return batch.media.shape[1:], batch.media.dtype, bool(batch.references)


def _apart(work: Callable[[], Sequence[Scores]]) -> asyncio.Future[Sequence[Scores]]:
    """Return the result of work in a daemon thread."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Sequence[Scores]] = loop.create_future()

    def deliver(outcome: Sequence[Scores] | BaseException) -> None:
        if done.done():
            return
        if isinstance(outcome, BaseException):
            done.set_exception(outcome)
        else:
            done.set_result(outcome)

    def carry_out() -> None:
        outcome: Sequence[Scores] | BaseException
        try:
            outcome = work()
        except BaseException as error:  # noqa: BLE001 - the caller receives it
            outcome = error
        with contextlib.suppress(RuntimeError):  # the server is gone
            loop.call_soon_threadsafe(deliver, outcome)

    threading.Thread(target=carry_out, name="batch", daemon=True).start()
    return done
