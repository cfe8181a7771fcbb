"""Detects that the current flow run was cancelled in the UI or API, and stops at the next shard.

A Prefect worker kills the process of a cancelled run. A run started from the command line has no worker, so it polls
the API. No other process can reach the temporary API of a run without a server, so that API is not polled.
"""

from __future__ import annotations

import time

from prefect.client.orchestration import get_client
from prefect.exceptions import TerminationSignal
from prefect.runtime import flow_run

from flowmill.configs.errors import CancelledError
from flowmill.configs.exits import StopSignal, is_interruption
from flowmill.flows.server import has_lasting_api

_EVERY_S = 2.0
_last = [0.0]


def check_cancelled() -> None:
    """Ask the API, at most every two seconds, whether this flow run is being cancelled."""
    now = time.monotonic()
    if not has_lasting_api() or now - _last[0] < _EVERY_S or not flow_run.id:
        return
    _last[0] = now
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(flow_run.id).state
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
