"""The program of each torchrun rank: it runs its share of many stages.

``torchrun ... -m flowmill.tasks.execution.worker DEVICE STALL_S``; jobs are lines on the first rank's standard input.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, astuple
from itertools import islice

from flowmill.configs.errors import WorkerError
from flowmill.configs.gc_tuning import starting

with starting():
    from torch.distributed.elastic.multiprocessing.errors import record

    from flowmill.models.devices import chosen_device, local_rank
    from flowmill.tasks.execution.executor import Executor, Listener
    from flowmill.tasks.execution.jobs import PREFIX, JobSession, JobSpec, own_code, run_of_job
    from flowmill.tasks.execution.process_executor import ProcessExecutor
    from flowmill.tasks.execution.session import Session
    from flowmill.tasks.runtime.heartbeat import Heartbeat
    from flowmill.tasks.runtime.kv_store import KeyValueStore
    from flowmill.tasks.runtime.ranks import Ranks, torchrun_ranks
    from flowmill.tasks.stages.stage import Shard
    from flowmill.tasks.stages.stage_run import StageRun

#: Collectives time out only after the watcher has detected a hanging rank.
_COLLECTIVE_PATIENCE, _LEAST_S = 3.0, 300.0
#: Seconds for a rank to end by itself when no more jobs can arrive.
_LEAVING_S = 5.0


class RankReporter:
    """Sends progress to the parent process as JSON lines, and to the heartbeat of this rank."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def progress(self, stage: str, epoch: int, done: int, total: int, detail: str = "") -> None:
        """Send progress."""
        self._ranks.pulse.at(f"{stage} of epoch {epoch}, {done} of {total}")
        send({"progress": [stage, epoch, done, total, detail]})

    def message(self, text: str) -> None:
        """Send a message; a message of all ranks is sent once."""
        if self._ranks.first:
            send({"message": text})


class Worker:
    """One rank; its models stay loaded between jobs."""

    def __init__(self, ranks: Ranks, board: KeyValueStore) -> None:
        """Bind to this process's rank and to the key-value store of the ranks."""
        self._ranks = ranks
        self._board = board
        self._jobs = JobSession(lambda: RankReporter(ranks), self._prepare)

    def run_job(self, job: JobSpec) -> None:
        """Run this rank's share of a stage, and report when all ranks are done."""
        board = self._board.below(f"job{job.number}")
        self._ranks.pulse.at(f"{job.node[1]} of epoch {job.node[0]}")
        session = self._jobs.of(job)
        run_share(run_of_job(job, session), session.executor(ProcessExecutor), self._ranks, board)
        board.post(f"done{self._ranks.rank}", json.dumps(session.host.loads))
        if self._ranks.first:
            with self._ranks.pulse.waiting():
                loads = [json.loads(board.read(f"done{rank}")) for rank in range(self._ranks.world)]
            send({"done": job.number, "loads": loads})

    def close(self) -> None:
        """End the scoring processes of this rank."""
        self._jobs.close()

    def _prepare(self, session: Session) -> None:
        session.host.ranks = self._ranks
        session.host.use_threads()


def run_share(run: StageRun, executor: Executor, ranks: Ranks, board: KeyValueStore) -> None:
    """Run this rank's share of a stage's pending shards with an executor; rank 0 commits collective results."""
    stage = run.stage
    stage.meet()
    if stage.first_rank_only and not ranks.first:
        return
    if not stage.collective:
        executor.run(run, deal(ranks, board, run.pending), Listener(on_commit=_committed))
        stage.rest()
        return
    for shard in listed(ranks, board, run.pending):
        if ranks.first:
            # Another run may have committed it in the meantime: all ranks work on it, or none.
            is_due = run.is_due(shard)
            board.post(f"due/{shard.name}", json.dumps(is_due))
        else:
            with ranks.pulse.waiting():
                is_due = json.loads(board.read(f"due/{shard.name}"))
        if not is_due:
            run.forget(shard)
        elif ranks.first:
            run.work_on(shard, is_due=True)()
            board.post(f"committed/{shard.name}", "")
        else:
            run.join_shard(shard)
            with ranks.pulse.waiting():
                board.read(f"committed/{shard.name}")
            run.joined(shard)
        if ranks.first:
            _committed([shard.name])


def _committed(names: Sequence[str]) -> None:
    for name in names:
        send({"committed": name})


def deal(ranks: Ranks, board: KeyValueStore, pending: Callable[[], Sequence[Shard]]) -> Iterator[Shard]:
    """Yield the shards of this rank: a free rank takes the next one, so a slow rank delays no other."""
    shards = listed(ranks, board, pending)
    while (number := board.take("next")) < len(shards):
        yield shards[number]


def listed(ranks: Ranks, board: KeyValueStore, pending: Callable[[], Sequence[Shard]]) -> list[Shard]:
    """Return rank 0's list of pending shards on every rank.

    A rank that lists shards later would miss shards committed in between, so the lists of the ranks would differ.
    """
    if ranks.first:
        board.post("shards", json.dumps([astuple(shard) for shard in pending()]))
    with ranks.pulse.waiting():
        return [Shard(*shard) for shard in json.loads(board.read("shards"))]


def jobs(ranks: Ranks, board: KeyValueStore) -> Iterator[JobSpec]:
    """Yield on every rank the jobs that the first rank reads from its standard input, until the input ends."""
    lines: queue.Queue[str] = queue.Queue()
    if local_rank() == 0:
        # On every machine: unread input would fill the pipe, and the end of input means that the parent is gone.
        threading.Thread(target=_read, args=(lines,), daemon=True, name="jobs").start()
    number = 0
    while True:
        with ranks.pulse.idle():
            if ranks.first:
                board.post(f"job{number}", lines.get())
            encoded = board.read(f"job{number}")
        if not encoded:
            return
        yield JobSpec.parse(encoded)
        number += 1


def _read(lines: queue.Queue[str]) -> None:
    """Pass lines on; at the end of input the parent is done or gone, so kill this rank if it does not end in time."""
    try:
        for line in sys.stdin:
            lines.put(line)
    finally:
        lines.put("")
        time.sleep(_LEAVING_S)
        os.kill(os.getpid(), signal.SIGKILL)


def same_code(ranks: Ranks, board: KeyValueStore) -> None:
    """Check that all ranks run the same code."""
    own = own_code()
    board.post(f"code{ranks.rank}", own)
    if ranks.first:
        others = {rank: board.read(f"code{rank}") for rank in range(ranks.world)}
        odd = [rank for rank, code in others.items() if code != own]
        if odd:
            raise WorkerError(
                f"Rank {odd[0]} runs another version of flowmill than rank 0. Install the same one on every machine."
            )


@record
def main() -> None:
    """Join the other ranks and run jobs until the input ends."""
    name, stall = sys.argv[1], float(sys.argv[2])
    patience = max(_LEAST_S, stall * _COLLECTIVE_PATIENCE)
    with torchrun_ranks(chosen_device(name, local_rank()), patience, _send_beats) as ranks:
        board = KeyValueStore()
        same_code(ranks, board)
        worker = Worker(ranks, board)
        with closing(worker):
            for job in jobs(ranks, board):
                worker.run_job(job)


def _send_beats(beats: Mapping[int, Heartbeat]) -> None:
    # A few at a time: only short lines stay intact when several ranks write to one pipe.
    items = iter(beats.items())
    while some := list(islice(items, 16)):
        send({"beats": {rank: asdict(beat) for rank, beat in some}})


def send(data: dict[str, object]) -> None:
    """Send a message to the parent, as one line."""
    sys.stdout.write(PREFIX + json.dumps(data) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
