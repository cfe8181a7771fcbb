"""Detects that the current flow run was cancelled in the UI or API, and stops at the next shard.

A Prefect worker kills the process of a cancelled run. A run started from the command line has no worker, so it polls
the API. No other process can reach the temporary API of a run without a server, so that API is not polled.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from prefect.client.orchestration import get_client
from prefect.exceptions import TerminationSignal
from prefect.runtime import flow_run

from flowmill.configs.errors import CancelledError
from flowmill.configs.exits import StopSignal, is_interruption
from flowmill.flows.server import has_lasting_api

_EVERY_S = 2.0
#: Time of the last request for each flow run, by its id.
_last: dict[str, float] = {}
#: The flow runs that this one is part of, from the outermost on.
_outer: ContextVar[tuple[str, ...]] = ContextVar("outer", default=())


@contextlib.contextmanager
def cancels_parts() -> Iterator[None]:
    """Check this flow run in the flows that it calls inside the block too: Prefect cancels the outer one alone."""
    token = _outer.set((*_outer.get(), *([str(flow_run.id)] if flow_run.id else [])))
    try:
        yield
    finally:
        _outer.reset(token)


def check_cancelled() -> None:
    """Ask the API, at most every two seconds, whether this flow run or one that it is part of is being cancelled."""
    if has_lasting_api():
        for each in dict.fromkeys((*_outer.get(), flow_run.id)):
            if each and time.monotonic() - _last.get(each, -_EVERY_S) >= _EVERY_S:
                _check(each)


def _check(flow_run_id: Any) -> None:
    _last[flow_run_id] = time.monotonic()
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(flow_run_id).state
    if state is not None and (state.is_cancelling() or state.is_cancelled()):
        raise CancelledError(
            "The flow run was cancelled. Everything committed stays; run the same command to continue."
        )


def was_stopped(error: BaseException) -> bool:
    """Return whether a cancellation or a signal caused an error."""
    return isinstance(error, CancelledError) or signal_behind(error) is not None


def signal_behind(error: BaseException) -> KeyboardInterrupt | StopSignal | TerminationSignal | None:
    """Return the signal's exception among the causes of an error; None if no signal caused it.

    A signal that arrives while Prefect sets up a task surfaces as an error of the task's clean-up.
    """
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, TerminationSignal):
            return link
        if isinstance(link, KeyboardInterrupt | StopSignal) and is_interruption(link):
            return link
        link = link.__cause__ or link.__context__
    return None
