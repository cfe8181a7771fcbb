"""State shared by the flows and tasks of one process: its open runs and its progress reporter."""

from __future__ import annotations

import logging
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prefect.runtime import flow_run

from flowmill.configs.errors import WorkerError
from flowmill.configs.escaping import visible
from flowmill.configs.schema import RunConfig
from flowmill.flows.chained import resolved_config
from flowmill.flows.requests import PipelineRequest
from flowmill.tasks.execution.jobs import JobSession, JobSpec, own_code
from flowmill.tasks.execution.session import Session
from flowmill.tasks.inputs.store_trust import remember
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runs.epoch_count import kept_length, length_note
from flowmill.tasks.runs.opening import begin_run
from flowmill.tasks.runs.progress import Reporter


class LogReporter:
    """Reports progress as log lines, for runs under a Prefect worker."""

    def __init__(self) -> None:
        self._log = logging.getLogger("prefect.flow_runs.flowmill")

    def progress(self, stage: str, epoch: int, done: int, total: int, detail: str = "") -> None:
        """Log a stage when it is finished."""
        if done == total:
            self._log.info("epoch %d %s %d/%d %s", epoch, stage, done, total, visible(detail))

    def message(self, text: str) -> None:
        """Log one line."""
        self._log.info(visible(text, keep="\n\t"))


_open: dict[tuple[str, str], Session] = {}
_reporter: list[Reporter] = []


def use_reporter(reporter: Reporter) -> None:
    """Use this reporter for every run opened from now on."""
    _reporter[:] = [reporter]


@contextmanager
def shown_by(reporter: Reporter) -> Iterator[None]:
    """Use this reporter for runs opened inside the block, and pass their errors on to the caller."""
    before = [*_reporter]
    use_reporter(reporter)
    try:
        yield
    finally:
        _reporter[:] = before


def reporter() -> Reporter:
    """Return the progress reporter."""
    return _reporter[0] if _reporter else LogReporter()


def flow_run_name() -> str:
    """Return the name of this flow run in Prefect's UI, built from its request."""
    request = flow_run.parameters["request"]
    request = request if isinstance(request, dict) else request.model_dump()
    name = request.get("run") or request.get("name") or Path(request["config"]).stem
    # The pipeline's flow run has the name of the run alone.
    flow = "" if flow_run.flow_name == "pipeline" else str(flow_run.flow_name)
    parts = [flow, f"e{request['epoch']}" if "epoch" in request else "", request.get("slot", "")]
    return " ".join([name, *filter(None, parts)])


def is_called() -> bool:
    """Return whether a program called the flow and reports its progress itself; otherwise only Prefect's UI does."""
    return bool(_reporter)


def configured(request: PipelineRequest, *, says: bool = False) -> RunConfig:
    """Return the config of a run: file, overrides, then root and name; it is trusted from now on.

    A run that has more epochs than the config keeps them, unless the request rewinds it.

    Args:
        says: report when the run keeps more epochs than the config has.
    """
    config = resolved_config(request)
    updated = kept_length(config, rewind=request.rewind)
    note = length_note(config, updated)
    if says and note is not None and request.advance is None:
        reporter().message(note)
    remember(updated)
    return updated


def begin(config: RunConfig) -> RunContext:
    """Return the context of a run that is started or continued in this process, or its context if already open."""
    context = begin_run(config, reporter=reporter())
    opened_session = _open.get(_key(context))
    return context if opened_session is None else opened_session.context


@contextmanager
def opened(context: RunContext) -> Iterator[Session]:
    """Yield the session of a run, and register it for the tasks of this process inside the block.

    A run that is already open shares its session. Executors and models are released at the end.
    """
    key, before = _key(context), _open.get(_key(context))
    session = before if before is not None and before.context is context else Session(context)
    _open[key] = session
    try:
        yield session
    finally:
        session.close()
        del _open[key]
        if before is not None:
            _open[key] = before


_visited = JobSession(reporter)
#: Held while models are used: concurrent tasks of different policies must not swap each other's models.
_visiting = threading.Lock()


@contextmanager
def session_of(job: JobSpec) -> Iterator[Session]:
    """Yield the session for a job: the open run's, else this process's own, which serves one task at a time."""
    opened_session = _open.get((job.root, job.run))
    if opened_session is not None:
        yield opened_session
        return
    if job.code != own_code():
        raise WorkerError(
            f"A worker on {platform.node()} runs another version of flowmill than run '{job.run}'. Install the same "
            "one on every machine."
        )
    with _visiting:
        yield _visited.of(job)


def _key(context: RunContext) -> tuple[str, str]:
    return (context.store.root.uri, context.run.name)
