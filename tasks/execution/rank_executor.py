"""The executor of ranks, in the orchestrating process: started once, they run stage after stage, see ``worker``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from flowmill.configs.errors import LostRankError, WorkerError
from flowmill.models.devices import chosen_device
from flowmill.tasks.execution.executor import SILENT, Listener
from flowmill.tasks.execution.jobs import PREFIX, JobSpec
from flowmill.tasks.execution.launch import Launched
from flowmill.tasks.execution.launchers import Program, make_launcher
from flowmill.tasks.execution.session import Session
from flowmill.tasks.runs.progress import Reporter
from flowmill.tasks.runtime.heartbeat import Heartbeat, Watch
from flowmill.tasks.stages.stage import Shard
from flowmill.tasks.stages.stage_run import StageRun

_LOOK_S = 0.5


class RankExecutor:
    """Ranks that keep their models and run stages together."""

    def __init__(self, session: Session) -> None:
        """Bind to the settings and the reporter of a run; no rank is started yet."""
        self._execution, self._reporter = session.context.config.execution, session.context.reporter
        self._launched: Launched | None = None
        self._sent = 0
        self.starts = 0
        """Number of starts of the ranks."""
        self.loads: list[dict[str, int]] = []
        """For each rank: number of times it read each part of a model from files since its start."""

    def start(self) -> None:
        """Start the ranks, unless they are started."""
        if self._launched is not None:
            return
        execution = self._execution
        if execution.nodes == 1:
            # Refuse more processes than this machine has devices before starting any.
            chosen_device(execution.device, execution.processes - 1)
        program = Program(
            module="flowmill.tasks.execution.worker",
            arguments=(execution.device, str(execution.stall_s)),
            processes=execution.processes,
            nodes=execution.nodes,
        )
        self._launched = Launched(program, make_launcher(execution))
        self._sent = 0
        self.starts += 1

    def run(self, run: StageRun, shards: Iterable[Shard], listener: Listener = SILENT) -> list[str]:
        """Run all pending shards of a stage; ranks that are ended from outside are started again.

        Args:
            shards: ignored: the first rank lists the pending shards itself.
            listener: receives the messages of the ranks.
        """
        names: list[str] = []
        for left in reversed(range(self._execution.retries + 1)):
            try:
                self._run(run, listener, names)
                break
            except LostRankError as error:
                self.stop()
                if not left:
                    raise
                self._reporter.message(f"{error} The ranks are started again, {left} times at most.")
            except BaseException:
                # Also on Ctrl-C and cancellation: busy ranks cannot take another job.
                self.stop()
                raise
        return names

    def close(self) -> None:
        """Let the ranks end by themselves."""
        if self._launched is not None:
            self._launched.leave()
            self._launched = None

    def stop(self) -> None:
        """Stop the ranks, even busy ones."""
        if self._launched is not None:
            self._launched.stop()
            self._launched = None

    def _run(self, run: StageRun, listener: Listener, names: list[str]) -> None:
        """Run the pending shards once, and add the names of committed ones."""
        self.start()
        launched = self._launched
        assert launched is not None
        job = JobSpec.of(run, number=self._sent)
        self._sent += 1
        launched.send(job.encoded())
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
            message = _parsed(line)
            if message is None:
                _pass_on(line, run.stage.name, self._reporter)
            elif "beats" in message:
                watch.heard({int(rank): Heartbeat(**beat) for rank, beat in message["beats"].items()})
            elif "progress" in message:
                self._reporter.progress(*message["progress"])
            elif "committed" in message:
                names.append(message["committed"])
                listener.on_commit([message["committed"]])
            elif "message" in message:
                self._reporter.message(message["message"])
            elif message.get("done") == job.number:
                self.loads = message["loads"]
                return
        raise WorkerError(f"{run.stage.node}: the ranks ended before the work was done.")


def _parsed(line: str) -> dict[str, Any] | None:
    """Return a rank's message; None for other output, which may have split a message line."""
    if not line.startswith(PREFIX):
        return None
    try:
        message = json.loads(line.removeprefix(PREFIX))
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


def _pass_on(line: str, stage: str, reporter: Reporter) -> None:
    if line.strip():
        reporter.message(f"[{stage}] {line}")
