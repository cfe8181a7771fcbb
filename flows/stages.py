"""Prefect wrappers of the stages: the executor that runs shards as tasks, and a flow per stage."""

from __future__ import annotations

import errno
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import astuple
from typing import Any

from prefect import Flow, flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.futures import PrefectFuture
from prefect.tasks import Task, exponential_backoff

from flowmill.configs.errors import ConfigError, FlowmillError, WorkerError, first_line
from flowmill.configs.registry import imported
from flowmill.flows import process_state
from flowmill.flows.cancellation import check_cancelled
from flowmill.flows.requests import StageRequest
from flowmill.flows.scheduled_runs import make_up_for_missed, scheduled, turn
from flowmill.storage.layout import ArtifactRef
from flowmill.tasks.execution.executor import Listener
from flowmill.tasks.execution.jobs import JobSpec, run_of_job
from flowmill.tasks.execution.process_executor import ProcessExecutor
from flowmill.tasks.execution.rank_executor import RankExecutor
from flowmill.tasks.execution.runners import make_runner
from flowmill.tasks.execution.session import Session
from flowmill.tasks.metrics.describe import StageResult, describe_stage
from flowmill.tasks.runs.extension import chosen_epoch, extend_for
from flowmill.tasks.runs.locks import executing_stage
from flowmill.tasks.runs.opening import open_run
from flowmill.tasks.runs.stage_selection import named_stages
from flowmill.tasks.specs.graph import Node
from flowmill.tasks.specs.stages import STAGES
from flowmill.tasks.stages.stage import Shard, Stage
from flowmill.tasks.stages.stage_run import StageRun
from flowmill.tasks.tracking.tracker import log_side_evaluations

Future = PrefectFuture[list[str]]
#: Listener that only checks for cancellation.
LOOKING = Listener(on_look=check_cancelled)
#: Seconds between two polls of a shard that another process makes.
_LOOK_S = 0.5
#: Seconds in which a cluster has to send the result of a task that the server knows to be final.
_FINAL_S = 30.0
#: Seconds of shards per task: short shards share a task, as each task costs a few hundredths of a second.
_TASK_S = 1.0
#: Most shards that a task is given: with all that are left, tasks would cost the square of the number of shards.
_OFFERED = 256
_TRANSIENT = {
    errno.EAGAIN,
    errno.EBUSY,
    errno.EIO,
    errno.ECONNABORTED,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
    errno.EPIPE,
    errno.EREMOTEIO,
    errno.ESTALE,
    errno.ETIMEDOUT,
}


def is_transient(task: Task[..., Any], task_run: TaskRun, state: State[Any]) -> bool:
    """Return whether a failed shard is retried: after connection and I/O errors, never a wrong config or a bug."""
    error = state.result(raise_on_failure=False)
    if isinstance(error, FlowmillError) or not isinstance(error, OSError):
        return False
    return isinstance(error, ConnectionError | TimeoutError) or error.errno in _TRANSIENT


@task(name="shards", cache_policy=NO_CACHE, persist_result=False, retry_condition_fn=is_transient)
def run_shards(job: str, shards: Sequence[tuple[str, int, int]], seconds: float = math.inf) -> list[str]:
    """Run and commit shards one after the other for up to ``seconds``; return their names, at least one.

    The manifests decide which shards are skipped, so Prefect's caching is off. All arguments are names rather than
    data, so any process that reaches the store can run the task.
    """
    parsed, began = JobSpec.parse(job), time.monotonic()
    with process_state.session_of(parsed) as session:
        run, executor = run_of_job(parsed, session), session.executor(ProcessExecutor)

        def timely() -> Iterator[Shard]:
            for shard in shards:
                yield Shard(*shard)
                # With a limit of time the caller waits here, but only other threads wait for processes.
                if time.monotonic() - began > seconds or (seconds < math.inf and executor.takes(run.stage)):
                    return

        try:
            return executor.run(run, timely())
        except Exception as error:
            shard = run.failed(error)
            if shard is not None:
                get_run_logger().error("shard %s of %s failed", shard.name, run.stage.node)
            raise


class TaskExecutor:
    """Runs shards as Prefect tasks: on ranks, in this thread, or on the task runner of threads, of Dask or of Ray."""

    def __init__(self, session: Session) -> None:
        self._session, self._section = session, session.context.config.execution
        self._runner = make_runner(self._section)
        self._stack = ExitStack()
        self._started: Any = None

    def is_elsewhere(self, stage: Stage) -> bool:
        """Return whether the shards of a stage are sent to other processes individually."""
        return stage.separable and self._runner.elsewhere

    def is_spread(self, stage: Stage) -> bool:
        """Return whether the run's ranks execute a stage together."""
        return stage.on_ranks and self._section.ranks > 1 and not self.is_elsewhere(stage)

    def start(self) -> None:
        """Start the task runner that ``execution.runner`` names, unless it is started."""
        if self._started is not None:
            return
        kind = imported(self._runner.task_runner, label="execution.runner")
        try:
            self._started = self._stack.enter_context(kind(**self._runner.arguments(self._section)))
            self._runner.connect(self._started)
        except (OSError, RuntimeError, ValueError, TypeError) as error:
            cause = f"{type(error).__name__}: {first_line(error)}".removesuffix(".")
            said = f"execution.runner '{self._section.runner.name}' cannot be started. {cause}. {self._runner.remedy}"
            raise ConfigError(said.strip()) from error

    def run(self, run: StageRun, shards: Iterable[Shard], listener: Listener = LOOKING) -> list[str]:
        """Run shards: all in one task on the ranks, each in a task in other processes, here for a second per task."""
        names, left, stage = list[str](), [*shards], run.stage
        if not left:
            return names
        if self.is_spread(stage):
            listener.on_look()
            ranks, name = self._session.executor(RankExecutor), f"{stage.name} e{stage.epoch} x{self._section.ranks}"
            return run_on_ranks.with_options(task_run_name=name)(run, ranks, left, listener)
        processes = self._session.executor(ProcessExecutor)
        while left and not (self.is_elsewhere(stage) or processes.takes(stage)):
            listener.on_look()
            offered = left[:_OFFERED]
            done = shards_task(run, offered)(job_of(run), list(map(astuple, offered)), _TASK_S)
            listener.on_commit(done)
            names += done
            left = left[len(done) :]
        return names + self.wait(run, {shard.name: self.submit(run, [shard]) for shard in left}, listener)

    def submit(self, run: StageRun, shards: Sequence[Shard], *, after: Sequence[Future] = ()) -> Future:
        """Submit shards as one task to the task runner, to start after other tasks, and return its future."""
        self.start()
        parameters = {"job": job_of(run), "shards": list(map(astuple, shards))}
        work = f"shard {shards[0].name} of {run.stage.node}"
        try:
            return self._started.submit(shards_task(run, shards), parameters, wait_for=[*after] or None)  # type: ignore[no-any-return]
        except Exception as error:
            if not self._runner.elsewhere:
                raise
            raise self._ended(work, f"{type(error).__name__}: {first_line(error)}") from error

    def wait(self, run: StageRun, started: Mapping[str, Future], listener: Listener = LOOKING) -> list[str]:
        """Wait for tasks of one shard each in order, and return the names; the first failed shard raises."""
        stage = run.stage
        # Processes of this machine count their own time.
        with stage.context.ledger.work(stage.name) if self.is_elsewhere(stage) else nullcontext():
            for done, (name, future) in enumerate(started.items(), 1):
                self.wait_for(future, f"shard {name} of {stage.node}", listener)
                stage.context.reporter.progress(stage.name, stage.epoch, done, len(started), stage.slot)
                listener.on_commit([name])
        return [*started]

    def wait_for(self, future: Future, work: str, listener: Listener = LOOKING) -> None:
        """Wait for a task and raise its error, or a WorkerError if its cluster ends before the task does."""
        since = math.inf
        while True:
            listener.on_look()
            try:
                future.result(timeout=_LOOK_S)
                return
            except Exception as error:
                # The result arrived: this is the task's own error. The server knows of tasks whose result is lost.
                if future._final_state is not None:
                    raise
                # Of Dask's ``sync`` where it ends without a result or an error, which says nothing of the task.
                is_unclear = isinstance(error, UnboundLocalError)
                if not (isinstance(error, TimeoutError) or is_unclear):
                    raise self._ended(work, f"{type(error).__name__}: {first_line(error)}") from error
                final = self._runner.elsewhere and future.state.is_final()
                unsent = "the task may have ended, but its result does not come", _FINAL_S
                fault, patience = unsent if final or is_unclear else self._runner.fault(self._started)
                since = min(since, time.monotonic()) if fault else math.inf
                if time.monotonic() - since > patience:
                    raise self._ended(work, fault) from error
                if is_unclear:
                    time.sleep(_LOOK_S)

    def _ended(self, work: str, fault: str) -> WorkerError:
        return WorkerError(
            f"execution.runner '{self._section.runner.name}' ended before {work} was done: {fault.removesuffix('.')}. "
            "Committed shards stay: start the cluster again if it is gone, then the same command continues."
        )

    def close(self) -> None:
        """End the task runner."""
        self._stack.close()
        self._started = None


def run_stage(session: Session, node: Node, *, force: bool = False) -> tuple[ArtifactRef, bool]:
    """Run the pending shards of a stage, here or under torchrun, and complete its artifact.

    Args:
        session: of the run.
        force: make another attempt although the artifact is complete.

    Returns:
        The artifact, and whether it was complete before.
    """
    run = StageRun(session.stage(node), force=force)
    due = run.pending()
    session.executor(TaskExecutor).run(run, due)
    run.finish()
    return run.ref, not due


def shards_task(run: StageRun, shards: Sequence[Shard]) -> Task[..., list[str]]:
    """Return the task for some shards with the run's retry settings and a readable name."""
    execution = run.stage.config.execution
    slot = f" {run.stage.slot}" if run.stage.slot else ""
    more = " ..." if len(shards) > 1 else ""
    return run_shards.with_options(
        retries=execution.retries,
        retry_delay_seconds=exponential_backoff(execution.retry_delay_s),
        task_run_name=f"{run.stage.name}{slot} e{run.stage.epoch} {shards[0].name}{more}",
    )


def job_of(run: StageRun) -> str:
    """Return the serialized description of a stage's work, for any process."""
    return JobSpec.of(run).encoded()


@task(name="ranks", cache_policy=NO_CACHE, persist_result=False)
def run_on_ranks(run: StageRun, ranks: RankExecutor, shards: Sequence[Shard], listener: Listener) -> list[str]:
    """Execute one stage on the run's ranks."""
    with run.stage.context.ledger.work(run.stage.name):
        return ranks.run(run, shards, listener)


def _stage_flow(name: str) -> Flow[..., Any]:
    @flow(name=name, flow_run_name=process_state.flow_run_name, persist_result=False)
    def stage_of_run(request: StageRequest) -> Any:
        """Run one stage of a run that exists."""
        with scheduled(request) as result:
            make_up_for_missed()
            result.value = _run_stage(name, request)
        return result.value

    return stage_of_run


def _run_stage(name: str, request: StageRequest) -> list[StageResult]:
    # The lock needs the store's settings.
    trusted = request.trust_store
    run = open_run(request.root, request.run, overrides=request.overrides, reads=True, trusted=trusted)
    with turn(run, request):
        # Another process may have changed the run's length in the meantime.
        run = open_run(request.root, request.run, reads=True, trusted=trusted)
        epoch = chosen_epoch(run, name, request.epoch)
        if request.epoch == "next" and not request.overrides:
            extend_for(run, Node(epoch, name, request.slot))
        context = open_run(
            request.root,
            request.run,
            overrides=request.overrides,
            reporter=process_state.reporter(),
            epoch=epoch,
            trusted=trusted,
        )
        with executing_stage(context), process_state.opened(context) as session:
            nodes = named_stages(context, Node(epoch, name, request.slot), evaluation=request.evaluation)
            results = []
            for node in nodes:
                ref, reused = run_stage(session, node, force=request.force and node.stage == name)
                results.append(describe_stage(context, node, ref, reused=reused))
    log_side_evaluations(context)
    return results


FLOWS = {name: _stage_flow(name) for name in STAGES}
"""The flow of each stage."""
# Entrypoints of deployments name the flow of a stage as an attribute of this module.
globals().update(FLOWS)
