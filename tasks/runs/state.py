"""The state of a run: running, stopped, failed or done; recorded by the process that executes it."""

from __future__ import annotations

import contextlib
import time

from configs.errors import FlowmillError
from tasks.runs.context import RunContext

_SERIES = "states"
#: Most characters of an error, far more than a message with its remedy has; tables cut it to their width.
_MOST = 4000


def note_state(context: RunContext, state: str, error: BaseException | None = None) -> None:
    """Record that a run is 'running', 'done', 'stopped', 'held' by an alert or 'failed'; suppress failures to write."""
    message = "" if error is None else str(error).strip().partition("\n")[0][:_MOST]
    with contextlib.suppress(FlowmillError, OSError):
        context.run.add(_SERIES, {"state": state, "at": round(time.time(), 3), "error": message})


def state_of(context: RunContext, *, complete: bool) -> str:
    """Return the state of a run: done, running, stopped, failed with the error, or not started.

    Args:
        context: the run.
        complete: whether all artifacts of its config are committed.
    """
    note = context.run.newest(_SERIES)
    state = None if note is None else str(note["state"])
    if state == "running":
        with contextlib.suppress(FlowmillError, OSError):
            if context.store.root.locked(context.run.lock_path):
                return "running"
        # Its writer ended without a final record.
        state = "stopped"
    if complete:
        return "done"
    if state in ("failed", "held") and note is not None:
        return f"{'failed' if state == 'failed' else 'stopped'}: {note['error']}"
    return "stopped" if state is not None or context.run.entries() else "not started"
