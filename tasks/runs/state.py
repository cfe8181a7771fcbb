"""The state of a run (running, stopped, failed or done) and its flow runs, recorded by processes that execute it."""

from __future__ import annotations

import contextlib
import time

from flowmill.configs.errors import FlowmillError
from flowmill.storage.artifacts.lineage import RunFolder
from flowmill.storage.artifacts.records import content
from flowmill.storage.backends.process_tags import is_gone, tag
from flowmill.tasks.runs.context import RunContext

_SERIES = "states"
#: Most characters of an error, far more than a message with its remedy has; tables cut it to their width.
_MOST = 4000
_FLOW_RUNS = "flow_runs"
#: Newest records in which lost flow runs are looked for.
_RECENT = 20


def note_state(context: RunContext, state: str, error: BaseException | None = None, *, flow_run: str = "") -> None:
    """Record that a run is 'running', 'done', 'stopped', 'held' by an alert or 'failed'; suppress failures to write.

    Args:
        error: what ended it.
        flow_run: id of the flow run that executes it.
    """
    message = "" if error is None else str(error).strip().partition("\n")[0][:_MOST]
    with contextlib.suppress(FlowmillError, OSError):
        context.run.add(_SERIES, {"state": state, "at": round(time.time(), 3), "error": message, "flow_run": flow_run})


def note_flow_run(context: RunContext, flow_run: str) -> None:
    """Record the flow run that this process carries out; suppress failures to write."""
    with contextlib.suppress(FlowmillError, OSError):
        context.run.add(_FLOW_RUNS, {"flow_run": flow_run, "process": tag()})


def state_of(context: RunContext, *, complete: bool) -> str:
    """Return the state of a run: done, running, stopped, failed with the error, or not started.

    Args:
        complete: whether all artifacts of its config are committed.
    """
    with contextlib.suppress(FlowmillError, OSError):
        # A process that still loads its libraries has recorded nothing.
        if context.store.root.locked(context.run.lock_path):
            return "running"
    if complete:
        return "done"
    state = last_state(context.run)
    if state in ("failed", "held"):
        return f"{'failed' if state == 'failed' else 'stopped'}: {(context.run.newest(_SERIES) or {})['error']}"
    return "stopped" if state is not None or context.run.entries() else "not started"


def lost_flow_runs(context: RunContext) -> list[str]:
    """Return recent flow runs of the run whose processes are gone; an id may be ''.

    Args:
        context: a run whose lock this process holds.
    """
    note = context.run.newest(_SERIES) or {}
    # Under the lock no other process executes the run, on any machine.
    executed = [str(note.get("flow_run", ""))] if note.get("state") == "running" else []
    records = context.run.series(_FLOW_RUNS, last=_RECENT)
    begun = (content(data, path) for path, data in records.items())
    # Prefect may start a flow run again, in another process: the last one counts.
    processes = {str(each.get("flow_run")): str(each.get("process")) for each in begun}
    return [*executed, *(name for name, process in processes.items() if is_gone(process))]


def last_state(run: RunFolder) -> str | None:
    """Return the last recorded state; None if there is none."""
    note = run.newest(_SERIES)
    return None if note is None else str(note["state"])
