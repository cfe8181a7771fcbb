"""The resident ranks of a run, seen from the process that orchestrates: started once, they take stage after stage."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from configs.errors import LostRankError, WorkerError
from configs.execution import ExecutionSection
from models.devices import chosen_device
from tasks.execution.job_spec import PREFIX, JobSpec
from tasks.execution.launch import Launched
from tasks.execution.launchers import Program, make_launcher
from tasks.runs.progress import Reporter
from tasks.runtime.heartbeat import Heartbeat, Watch
from tasks.stages.stage_run import StageRun

_LOOK_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """Receives messages of the ranks while they run a job."""

    on_commit: Callable[[str], None]
    """Hears the name of each shard as soon as it is committed."""
    on_look: Callable[[], None]
    """Called about twice a second; an exception ends the ranks."""


class WorkerGroup:
    """Processes that keep their models and run stages together."""

    def __init__(self, execution: ExecutionSection, reporter: Reporter) -> None:
        """Bind to execution settings and to the listener of ranks; nothing is started yet."""
        self._execution, self._reporter = execution, reporter
        self._launched: Launched | None = None
        self._given = 0
        self._epochs = 0
        self.starts = 0
        """How often ranks were started."""
        self.loads: list[dict[str, int]] = []
        """How often each rank read each part of a model from its files, since they were started."""

    def carry_out(self, run: StageRun, listener: Listener) -> None:
        """Have all pending shards of a stage made; ranks that something ended from outside are started again.

        Raises:
            WorkerError: a rank failed, hangs, or was ended too often.
        """
        for left in reversed(range(self._execution.retries + 1)):
            try:
                return self._carry_out(run, listener)
            except LostRankError as error:
                self.stop()
                if not left:
                    raise
                self._reporter.message(f"{error} The ranks are started again, {left} times at most.")
            except BaseException:
                # Also on Ctrl-C and cancellation: ranks that are in the middle of something cannot take another order.
                self.stop()
                raise

    def begin_epoch(self) -> None:
        """Let ranks go that have stayed for ``execution.resident_epochs``; the next job starts new ones."""
        limit = self._execution.resident_epochs
        if limit is not None and self._epochs >= limit:
            self.close()
        self._epochs += 1

    def close(self) -> None:
        """Let the ranks go."""
        if self._launched is not None:
            self._launched.leave()
            self._launched = None

    def stop(self) -> None:
        """End the ranks, whatever they are doing."""
        if self._launched is not None:
            self._launched.stop()
            self._launched = None

    def _carry_out(self, run: StageRun, listener: Listener) -> None:
        launched = self._started()
        order = JobSpec.of(run, number=self._given)
        self._given += 1
        launched.tell(order.line())
        watch = Watch(self._execution.stall_s, world=self._execution.ranks)
        for line in launched.lines(_LOOK_S):
            listener.on_look()
            hanging = watch.hanging()
            if hanging is not None:
                raise WorkerError(
                    f"{run.stage.node}: {hanging}. Nothing committed is lost: run the same command again, or raise "
                    f"execution.stall_s, which is {self._execution.stall_s:g}, if the work can take that long."
                )
            if line is None:
                continue
            said = _parsed(line)
            if said is None:
                _pass_on(line, run.stage.name, self._reporter)
            elif "beats" in said:
                watch.heard({int(rank): Heartbeat(**beat) for rank, beat in said["beats"].items()})
            elif "progress" in said:
                self._reporter.progress(*said["progress"])
            elif "committed" in said:
                listener.on_commit(said["committed"])
            elif "message" in said:
                self._reporter.message(said["message"])
            elif said.get("done") == order.number:
                self.loads = said["loads"]
                return
        raise WorkerError(f"{run.stage.node}: the ranks ended before the work was done.")

    def _started(self) -> Launched:
        if self._launched is None:
            execution = self._execution
            if execution.nodes == 1:
                # Too many processes for the devices of this machine are refused before any is started.
                chosen_device(execution.device, execution.processes - 1)
            program = Program(
                module="tasks.execution.worker",
                arguments=(execution.device, str(execution.stall_s)),
                processes=execution.processes,
                nodes=execution.nodes,
            )
            self._launched = Launched(program, make_launcher(execution))
            self._given = self._epochs = 0
            self.starts += 1
        return self._launched


def _parsed(line: str) -> dict[str, Any] | None:
    """Return a rank's message; None for other output, which may have torn one of our lines."""
    if not line.startswith(PREFIX):
        return None
    try:
        said = json.loads(line.removeprefix(PREFIX))
    except ValueError:
        return None
    return said if isinstance(said, dict) else None


def _pass_on(line: str, stage: str, reporter: Reporter) -> None:
    if line.strip():
        reporter.message(f"[{stage}] {line}")
