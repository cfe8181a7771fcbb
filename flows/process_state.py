"""What the flows and tasks of one process share: the runs that are open in it, and who shows progress."""

from __future__ import annotations

import logging
import platform
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from prefect.runtime import flow_run

from configs.errors import ConfigError, WorkerError
from configs.escaping import visible
from configs.load import load_config
from configs.override_quoting import text_override
from configs.registry import imported
from configs.schema import RunConfig
from flows.requests import PipelineRequest
from tasks.execution.execution import Execution
from tasks.execution.job_context import JobExecution
from tasks.execution.job_spec import JobSpec, own_code
from tasks.execution.reward_pool import RewardPool
from tasks.execution.runners import make_runner
from tasks.inputs.store_trust import remember
from tasks.runs.context import RunContext
from tasks.runs.epoch_count import kept_length, length_note
from tasks.runs.opening import begin_run
from tasks.runs.progress import Reporter


class LogReporter:
    """Progress as log lines, for runs under a Prefect worker."""

    def __init__(self) -> None:
        """Log to Prefect's run logger, which the UI shows."""
        self._log = logging.getLogger("prefect.flow_runs.flowmill")

    def progress(self, stage: str, epoch: int, done: int, total: int, detail: str = "") -> None:
        """Log finished stages only."""
        if done == total:
            self._log.info("epoch %d %s %d/%d %s", epoch, stage, done, total, visible(detail))

    def message(self, text: str) -> None:
        """Log one line."""
        self._log.info(visible(text, keep="\n\t"))


class Open:
    """A run that flows of this process work on."""

    def __init__(self, execution: Execution) -> None:
        """Bind to what its stages work with; no runner is started yet."""
        self.execution = execution
        self._stack = ExitStack()
        self._runner: Any = None
        self.scorers = RewardPool(execution.context)
        """Processes that score beside this one."""

    @property
    def runner(self) -> Any:
        """Prefect's task runner as ``execution.runner`` asks for it, started when it is needed first."""
        if self._runner is None:
            execution = self.execution.context.config.execution
            chosen = make_runner(execution)
            kind = imported(chosen.task_runner, label="execution.runner")
            try:
                self._runner = self._stack.enter_context(kind(**chosen.arguments(execution)))
                chosen.connect(self._runner)
            except (OSError, RuntimeError, ValueError, TypeError) as error:
                said = f"{type(error).__name__}: {error}".strip()
                raise ConfigError(f"execution.runner '{execution.runner.name}' cannot be started. {said}") from error
        return self._runner

    def close(self) -> None:
        """Let workers, ranks and models go."""
        self.scorers.close()
        self._stack.close()
        self._runner = None
        self.execution.close()


_open: dict[tuple[str, str], Open] = {}
_reporter: list[Reporter] = []


def use_reporter(reporter: Reporter) -> None:
    """Show the progress of every run opened from here on with this reporter."""
    _reporter[:] = [reporter]


@contextmanager
def shown_by(reporter: Reporter) -> Iterator[None]:
    """Show the progress of runs opened inside with this reporter; errors inside are for who called."""
    before = [*_reporter]
    use_reporter(reporter)
    try:
        yield
    finally:
        _reporter[:] = before


def reporter() -> Reporter:
    """Return who shows progress."""
    return _reporter[0] if _reporter else LogReporter()


def flow_run_name() -> str:
    """Return the name of this flow run in Prefect's UI, from what it was asked."""
    asked = flow_run.parameters["request"]
    asked = asked if isinstance(asked, dict) else asked.model_dump()
    name = asked.get("run") or asked.get("name") or Path(asked["config"]).stem
    # The pipeline is the run.
    flow = "" if flow_run.flow_name == "pipeline" else str(flow_run.flow_name)
    about = [flow, f"e{asked['epoch']}" if "epoch" in asked else "", asked.get("slot", "")]
    return " ".join([name, *filter(None, about)])


def is_called() -> bool:
    """Return whether a program called the flow and shows what happens, rather than Prefect's UI alone."""
    return bool(_reporter)


def configured(request: PipelineRequest, *, says: bool = False) -> RunConfig:
    """Return the config a run is started with: file, overrides, then root and name; it is trusted from now on.

    A run that has more epochs than that asks for keeps them, unless it is to be rewound.

    Args:
        request: what is asked for.
        says: tell the reporter where the run keeps its length.

    Raises:
        ConfigError: something in it cannot work.
    """
    extra = [*request.overrides]
    if request.root is not None:
        extra.append(text_override("store.root", request.root))
    if request.name is not None:
        extra.append(text_override("run.name", request.name))
    asked = load_config(request.config, extra)
    given = kept_length(asked, rewind=request.rewind)
    note = length_note(asked, given)
    if says and note is not None and request.advance is None:
        reporter().message(note)
    remember(given)
    return given


def begin(config: RunConfig) -> RunContext:
    """Return the context of a run that is started or continued in this process; one that is open already stays."""
    context = begin_run(config, reporter=reporter())
    found = _open.get(_key(context))
    return context if found is None else found.execution.context


@contextmanager
def opened(context: RunContext) -> Iterator[Execution]:
    """Give what a run's stages work with, and let the tasks of this process find it, inside.

    Of a run that is open already it is what that has; else workers, ranks and models are released afterwards.
    """
    key, before = _key(context), _open.get(_key(context))
    kept = before.execution if before is not None and before.execution.context is context else None
    made = Open(kept or Execution(context))
    _open[key] = made
    try:
        yield made.execution
    finally:
        made.close()
        del _open[key]
        if before is not None:
            _open[key] = before


def task_runner(context: RunContext) -> Any:
    """Return the task runner of an open run."""
    return _open[_key(context)].runner


def scorers(context: RunContext) -> RewardPool:
    """Return the processes that score for an open run."""
    return _open[_key(context)].scorers


def scorers_of(order: JobSpec, execution: Execution) -> RewardPool:
    """Return the processes that score what is ordered, of an open run; of one that another process leads, none."""
    found = _open.get((order.root, order.run))
    return RewardPool(execution.context) if found is None else found.scorers


_visited = JobExecution()
#: Held while models are used: tasks of different policies must not exchange them under each other.
_visiting = threading.Lock()


@contextmanager
def execution_of(order: JobSpec) -> Iterator[Execution]:
    """Give what an order's run works with: what is open here, else this process's own, one task at a time.

    Raises:
        WorkerError: this process is another program than the one that gave the order.
    """
    found = _open.get((order.root, order.run))
    if found is not None:
        yield found.execution
        return
    if order.code != own_code():
        raise WorkerError(
            f"A worker on {platform.node()} runs another version of flowmill than run '{order.run}'. Install the same "
            "one on every machine."
        )
    with _visiting:
        yield _visited.of(order, reporter, lambda execution: None)


def _key(context: RunContext) -> tuple[str, str]:
    return (context.store.root.uri, context.run.name)
