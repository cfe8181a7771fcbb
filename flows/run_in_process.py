"""Runs flows for a caller that needs their result: a command, a notebook, or a user's own Prefect flow."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from flowmill.configs.errors import CancelledError, FlowmillError, in_words
from flowmill.configs.exits import StopSignal, user_code
from flowmill.flows.environment import prepare_environment, wants_traceback
from flowmill.flows.server import LocalApi, local_api

if TYPE_CHECKING:
    from flowmill.flows.requests import Request

_LOGGERS = (
    "prefect.flow_runs",
    "prefect.task_runs",
    "prefect.engine",
    "prefect.flow_engine",
    "prefect.task_engine",
)
#: Levels of these loggers at the start of each flow at work; a program may run flows in several threads.
_levels: list[dict[str, int]] = []
_lock = threading.Lock()


def call(flow: Any, request: Request, *, threads: int = 1) -> Any:
    """Run a flow from a user's program and return its result: as a subflow of theirs, or on a temporary server."""
    prepare_environment(threads)
    from prefect.context import FlowRunContext

    from flowmill.flows import cancellation, process_state

    if FlowRunContext.get() is not None:
        with process_state.shown_by(process_state.LogReporter()), cancellation.cancels_parts():
            return outcome(flow(request, return_state=True))
    from flowmill.flows.console import console
    from flowmill.flows.progress import Messages, display

    shown = display(quiet=False, epochs=1) if sys.stdout.isatty() or console.is_jupyter else Messages()
    with shown, process_state.shown_by(shown), on_server(_server()):
        return outcome(flow(request, return_state=True))


def _server() -> LocalApi | None:
    """Return this process's server, started once because Prefect keeps sending events to the first server it used.

    None if the user names a server.
    """
    with _lock:
        return _started_server()


@functools.cache
def _started_server() -> LocalApi | None:
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(local_api())


@contextlib.contextmanager
def on_server(api: LocalApi | None) -> Iterator[None]:
    """Run flows inside the block on a server, with Prefect's log silenced: the caller gets the errors."""
    from prefect.settings import PREFECT_API_URL, PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

    from flowmill.flows.api import lasting

    settings: dict[Any, Any] = {}
    if api is not None:
        # No automation reads the heartbeats of a temporary server, which cost every flow up to a second at its end.
        settings = {PREFECT_API_URL: api.wait(), PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}
    with _silenced(), temporary_settings(settings), contextlib.nullcontext() if api else lasting():
        yield


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    with _lock:
        _levels.append({name: logging.getLogger(name).level for name in _LOGGERS})
        for name in _LOGGERS:
            logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        with _lock:
            if len(_levels) == 1:
                for name, level in _levels[0].items():
                    logging.getLogger(name).setLevel(level)
            _levels.pop()


def outcome(state: Any) -> Any:
    """Return the result of a flow run from its final state; flowmill's own errors and signals propagate unchanged."""
    if state.is_cancelling():
        # It was cancelled before it began, so no process ends it.
        _end_cancelled(state.state_details.flow_run_id)
    if state.is_cancelled() or state.is_cancelling():
        raise CancelledError(state.message or "the flow run was cancelled before it began")
    result = state.result(raise_on_failure=False)
    if isinstance(result, BaseException):
        stop_if_interrupted(result)
    if isinstance(result, FlowmillError) or (isinstance(result, BaseException) and wants_traceback()):
        raise result
    if isinstance(result, BaseException):
        raise FlowmillError(_explain(result)) from result
    return result


def _end_cancelled(flow_run: Any) -> None:
    import httpx
    from prefect.client.orchestration import get_client
    from prefect.exceptions import PrefectException
    from prefect.states import Cancelled

    with contextlib.suppress(PrefectException, httpx.HTTPError), get_client(sync_client=True) as client:
        client.set_flow_run_state(flow_run, Cancelled(), force=True)


def stop_if_interrupted(error: BaseException) -> None:
    """Stop as Ctrl-C or SIGTERM would if one of them caused an error.

    Raises:
        KeyboardInterrupt: Ctrl-C caused it.
        StopSignal: a signal caused it.
    """
    from flowmill.flows.cancellation import signal_behind

    cause = signal_behind(error)
    if isinstance(cause, KeyboardInterrupt | StopSignal):
        raise cause
    if cause is not None:
        raise StopSignal(128 + int(cause.signal))


def _explain(error: BaseException) -> str:
    message = in_words(error)
    if place := user_code(error):
        message += f" {place} raised it; FLOWMILL_TRACEBACK=1 shows how it was called."
    if place or hasattr(error, "__notes__") or (isinstance(error, OSError) and error.errno is not None):
        return f"{message} Committed data stays; fix the cause and run the same command again."
    return f"{message} This is not a known mistake; FLOWMILL_TRACEBACK=1 shows where it happened. Committed data stays."
