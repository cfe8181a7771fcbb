"""The executor of this process, with a pool of scoring processes: rewards without an accelerator block no sampling.

The pool is loky's, which joblib ships: unlike the standard library's pool it does not run the user's script again in
every process, and it reports killed processes.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import astuple
from typing import Any

from joblib.externals.loky import BrokenProcessPool, ProcessPoolExecutor
from joblib.externals.loky.process_executor import ShutdownExecutorError

from flowmill.configs.errors import LostRankError, WorkerError
from flowmill.tasks.execution.executor import SILENT, Listener
from flowmill.tasks.execution.jobs import JobSession, JobSpec, run_of_job
from flowmill.tasks.execution.runners import make_runner, score_workers
from flowmill.tasks.execution.session import Session
from flowmill.tasks.runs.sharding import evaluation_cuts, rollout_cuts
from flowmill.tasks.stages.scoring import Scoring
from flowmill.tasks.stages.stage import Shard, Stage
from flowmill.tasks.stages.stage_run import StageRun

#: Least seconds of scoring in this process so far, and per shard, before processes are started, which takes seconds.
_WORTH_S, _SLOW_S = 8.0, 0.2
#: Seconds after which an idle process ends.
_IDLE_S = 60.0
_LOOK_S = 0.5

#: Messages of a scoring process, which its parent reports.
_Messages = list[tuple[str, int, int, int, str]]


class ProcessExecutor:
    """Runs shards in this process, and those of slow rewards in scoring processes, which end with the run."""

    def __init__(self, session: Session) -> None:
        """Bind to a run; no process is started yet."""
        context, on_rank = session.context, session.host.ranks.world > 1
        config = context.config
        self._config, self._ledger, self._reporter = config, context.ledger, context.reporter
        shards = max(len(rollout_cuts(config)), 2 * len(evaluation_cuts(config)))
        workers = 1 if make_runner(config.execution).elsewhere else score_workers(config.execution, on_rank=on_rank)
        self.count = min(workers, shards)
        """Most processes."""
        self._pool: Any = None
        self._closed = False
        self._lock = threading.Lock()
        self._here = threading.Lock()

    def takes(self, stage: Stage) -> bool:
        """Return whether several processes score a stage from now on; for a cheap reward starting them takes too long.

        Never for rewards of a server, nor for rewards on an accelerator, whose memory only one process uses.
        """
        scores = isinstance(stage, Scoring) and not stage.needs_accelerator and stage.section.server is None
        spent, each = self._ledger.seconds(stage.name), self._ledger.typical(stage.name)
        return self.count > 1 and scores and spent >= _WORTH_S and each >= _SLOW_S

    def run(self, run: StageRun, shards: Iterable[Shard], listener: Listener = SILENT) -> list[str]:
        """Run shards one after the other in this process, and in all processes in parallel as soon as ``takes``."""
        stage, left = run.stage, iter(shards)
        # Rewards need not be thread-safe.
        own = isinstance(stage, Scoring) and stage.section.server is None
        with self._here if own else nullcontext():
            names = run.run_shards(self._while_here(stage, left), on_commit=listener.on_commit)
        return [*names, *self._run_in_processes(run, left, listener)] if self.takes(stage) else names

    def _while_here(self, stage: Stage, left: Iterator[Shard]) -> Iterator[Shard]:
        while not self.takes(stage):
            shard = next(left, None)
            if shard is None:
                return
            yield shard

    def _run_in_processes(self, run: StageRun, left: Iterator[Shard], listener: Listener) -> list[str]:
        names, lock, failed, job = list[str](), threading.Lock(), threading.Event(), JobSpec.of(run).encoded()

        def work() -> None:
            while not failed.is_set():
                with lock:
                    shard = next(left, None)
                if shard is None:
                    return
                try:
                    with run.named(shard), self._ledger.work(run.stage.name):
                        self._score(run, job, shard)
                except BaseException:
                    failed.set()
                    raise
                names.append(shard.name)
                listener.on_commit([shard.name])

        with ThreadPoolExecutor(self.count) as threads:
            for done in [threads.submit(work) for _ in range(self.count)]:
                done.result()
        return names

    def start(self) -> None:
        """Make the pool, which starts its processes on demand."""
        self._started()

    def _started(self) -> Any:
        with self._lock:
            if self._closed:
                raise WorkerError("The processes that score were ended with the run; committed shards stay.")
            if self._pool is None:
                self._pool = ProcessPoolExecutor(
                    self.count, timeout=_IDLE_S, initializer=_begin, initargs=(os.getpid(),)
                )
            return self._pool

    def close(self) -> None:
        """Kill the processes, even busy ones; no process is started after this."""
        with self._lock:
            pool, self._pool, self._closed = self._pool, None, True
        if pool is not None:
            pool.shutdown(wait=True, kill_workers=True)

    def _score(self, run: StageRun, job: str, shard: Shard) -> None:
        """Have one shard scored; a process that is ended from outside is replaced."""
        for left in reversed(range(self._config.execution.retries + 1)):
            pool = self._started()
            try:
                messages = pool.submit(_scored, job, astuple(shard)).result()
            except (BrokenProcessPool, ShutdownExecutorError):
                with self._lock:
                    self._pool = None if self._pool is pool else self._pool
                if not left:
                    raise LostRankError(
                        f"{run.stage.node}: processes that score were ended from outside again and again, as the "
                        "system does when memory runs out. Lower execution.score_workers, which is "
                        f"{self.count} here; committed shards stay."
                    ) from None
                continue
            for each in messages:
                self._reporter.progress(*each)
            return


class _MessageList:
    """Keeps the messages of a stage."""

    def __init__(self) -> None:
        self.messages: _Messages = []

    def progress(self, stage: str, epoch: int, done: int, total: int, detail: str = "") -> None:
        self.messages.append((stage, epoch, done, total, detail))

    def message(self, text: str) -> None:
        """Ignore it: errors are raised."""


_messages = _MessageList()
_session = JobSession(lambda: _messages)


def _begin(parent: int) -> None:
    """Set up a scoring process: it leaves interrupts to its parent, and ends with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), daemon=True, name="parent").start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _scored(encoded: str, shard: tuple[str, int, int]) -> _Messages:
    """Score and commit a shard of a job's stage; return its messages."""
    job = JobSpec.parse(encoded)
    session = _session.of(job)
    _messages.messages = []
    run_of_job(job, session).run_shard(Shard(*shard))
    return _messages.messages
