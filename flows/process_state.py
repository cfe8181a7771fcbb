"""State shared by the flows and tasks of one process: the open run of a thread, and its progress reporter."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from prefect.runtime import flow_run

from flowmill.configs.escaping import visible
from flowmill.configs.schema import RunConfig
from flowmill.flows.chained import resolved_config
from flowmill.flows.requests import PipelineRequest
from flowmill.tasks.execution.jobs import JobSession, JobSpec, own_code, settings_of, version_error
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


#: Of this thread and the tasks it submits: concurrent calls of a program may open one run with other settings each.
_open: ContextVar[Session | None] = ContextVar("open", default=None)
_reporter: ContextVar[Reporter | None] = ContextVar("reporter", default=None)


def use_reporter(reporter: Reporter) -> None:
    """Use this reporter for every run opened from now on."""
    _reporter.set(reporter)


@contextmanager
def shown_by(reporter: Reporter) -> Iterator[None]:
    """Use this reporter for runs opened inside the block, and pass their errors on to the caller."""
    before = _reporter.set(reporter)
    try:
        yield
    finally:
        _reporter.reset(before)


def reporter() -> Reporter:
    """Return the progress reporter."""
    return _reporter.get() or LogReporter()


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
    return _reporter.get() is not None


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
    """Return the context of a run that is started or continued here; if it is open with this config, that context."""
    context, session = begin_run(config, reporter=reporter()), _open.get()
    is_open = session is not None and settings_of(session.context) == settings_of(context)
    return session.context if session is not None and is_open else context


@contextmanager
def opened(context: RunContext) -> Iterator[Session]:
    """Yield the session of a run, for this thread and the tasks it submits inside the block.

    A context that is already open shares its session. Executors and models are released at the end.
    """
    before = _open.get()
    session = before if before is not None and before.context is context else Session(context)
    token = _open.set(session)
    try:
        yield session
    finally:
        session.close()
        _open.reset(token)


_visited = JobSession(reporter)
#: Held while models are used: concurrent tasks of different policies must not swap each other's models.
_visiting = threading.Lock()


@contextmanager
def session_of(job: JobSpec) -> Iterator[Session]:
    """Yield the session for a job: the open run's if the job is of it, else this process's own, which serves one task
    at a time."""
    session = _open.get()
    if session is not None and job.is_of(session.context):
        yield session
        return
    if job.code != own_code():
        raise version_error(job.run)
    with _visiting:
        yield _visited.of(job)
