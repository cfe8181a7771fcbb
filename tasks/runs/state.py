"""The state of a run: running, stopped, failed or done; recorded by the process that executes it."""

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
        record = {"state": state, "at": round(time.time(), 3), "error": message, "flow_run": flow_run, "process": tag()}
        context.run.add(_SERIES, record)


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
    """Return the recent flow runs that executed the run and whose processes are gone: killed, or at their end.

    Args:
        context: a run whose lock this process holds.
    """
    records = context.run.series(_SERIES, last=_RECENT)
    last = {note.get("flow_run", ""): note for note in (content(data, path) for path, data in records.items())}
    return [
        name
        for name, note in last.items()
        if name and (note["state"] == "running" or is_gone(str(note.get("process", ""))))
    ]


def last_state(run: RunFolder) -> str | None:
    """Return the last recorded state; None if there is none."""
    note = run.newest(_SERIES)
    return None if note is None else str(note["state"])
