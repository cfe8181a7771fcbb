"""Flows as a worker carries them out: missed ticks, runs that are busy, GPUs that are shared, and how they fail."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any, TypeVar, get_type_hints

import tenacity
from prefect import get_run_logger
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterId,
    FlowRunFilter,
    FlowRunFilterExpectedStartTime,
    FlowRunFilterState,
    FlowRunFilterStateName,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import State, StateType
from prefect.concurrency.sync import concurrency
from prefect.exceptions import FailedRun, ObjectNotFound
from prefect.runtime import deployment, flow_run
from prefect.states import Cancelled, Completed, Failed

from configs.errors import CancelledError, ConfigError, FlowmillError, RunConflictError, in_words
from flows.cancellation import check_cancelled
from flows.process_state import is_called
from flows.requests import GPU_SLOTS, Request
from tasks.runs.context import RunContext
from tasks.runs.locks import refuse_while_executing

_LOOK_S = 5.0
#: Loggers of Prefect's engine.
_ENGINE = ("prefect.flow_runs", "prefect.engine")
#: States in which a scheduled flow run waits for its process; one that awaits a retry has begun.
_NOT_BEGUN = ["Scheduled", "Late", "AwaitingConcurrencySlot"]
_Asked = TypeVar("_Asked", bound=Request)


def scheduled(work: Callable[[_Asked], Any]) -> Callable[[_Asked], Any]:
    """Have a flow's function make up for missed ticks at once, and fail with a message that says how to go on.

    Where a program called the flow, errors come out as they are: it is told what is wrong.
    """

    def carried_out(request: _Asked) -> Any:
        try:
            if not is_called():
                make_up_for_missed()
            return work(request)
        except CancelledError as error:
            return Cancelled(message=str(error))
        except Exception as error:
            if is_called():
                raise
            return _failed(error, request)

    functools.update_wrapper(carried_out, work)
    # Prefect makes the form of what the annotations name, and looks for the names in this module.
    carried_out.__annotations__ = get_type_hints(work)
    del carried_out.__wrapped__  # type: ignore[attr-defined]
    return carried_out


def _failed(error: Exception, request: Request) -> State[Any]:
    """Log what went wrong and how to go on, and return it as the state of the flow run."""
    known = isinstance(error, FlowmillError)
    said = str(error) if known else in_words(error)
    command = request.command(str(flow_run.flow_name), deployment.name)
    message = f"{said}\nWhat is committed stays. To go on: {command}"
    # Of a bug, maybe of somebody's reward, or a connection that did not come back, the traceback is of use.
    get_run_logger().error(message, exc_info=not known)
    for logger in _ENGINE:
        # The engine would add the traceback of the failure it is handed here.
        logging.getLogger(logger).addFilter(_is_news)
    return Failed(message=message)


def _is_news(record: logging.LogRecord) -> bool:
    """Return whether a record is other than the traceback of a failure that was told already."""
    return not (record.exc_info and isinstance(record.exc_info[1], FailedRun))


def make_up_for_missed() -> None:
    """End other scheduled flow runs of the own deployment that are due by now as ``Skipped``; this one does the work.

    Ticks that were missed while no worker ran, or while a flow run was longer than the interval, are so caught up once.
    The one that began ends those that did not, instead of giving way: where ticks come faster than processes start,
    all would give way.
    """
    if not flow_run.id:
        return
    with get_client(sync_client=True) as client:
        own = client.read_flow_run(flow_run.id)
        if not own.auto_scheduled or own.deployment_id is None:
            return
        due = client.read_flow_runs(
            flow_run_filter=FlowRunFilter(
                state=FlowRunFilterState(
                    type=FlowRunFilterStateType(any_=[StateType.SCHEDULED]),
                    name=FlowRunFilterStateName(any_=_NOT_BEGUN),
                ),
                expected_start_time=FlowRunFilterExpectedStartTime(before_=datetime.now(UTC)),
            ),
            deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[own.deployment_id])),
        )
        for other in due:
            if other.auto_scheduled and other.id != own.id:
                skipped: State[None] = Completed(
                    name="Skipped", message=f"{own.name}, which began after this was due, does the work."
                )
                client.set_flow_run_state(other.id, skipped, force=True)


@contextlib.contextmanager
def turn(context: RunContext, request: Request) -> Iterator[None]:
    """Wait until no other process executes the run, as long as was asked for, and hold GPU slots inside.

    Raises:
        RunConflictError: another process still does.
        ConfigError: the server's limit is missing or smaller.
        CancelledError: the flow run was cancelled meanwhile.
    """
    # First: who waits for a run should keep no GPU from others.
    _await_turn(context, request.wait_minutes * 60)
    if not request.gpu_slots:
        yield
        return
    _require_slots(request.gpu_slots)
    with concurrency(GPU_SLOTS, occupy=request.gpu_slots, strict=True):
        yield


def _require_slots(count: int) -> None:
    """Check that the server has the limit: without it, Prefect would let all go on at once, or none ever."""
    try:
        with get_client(sync_client=True) as client:
            limit = client.read_global_concurrency_limit_by_name(GPU_SLOTS).limit
    except ObjectNotFound:
        limit = 0
    if limit < count:
        raise ConfigError(
            f"gpu_slots is {count}, but Prefect's global concurrency limit '{GPU_SLOTS}' has {limit}. Set it with "
            f"'flowmill deploy --gpu-slots N'."
        )


def _await_turn(context: RunContext, patience: float) -> None:
    deadline = time.monotonic() + patience

    def pause(seconds: float) -> None:
        check_cancelled()
        time.sleep(seconds)

    tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(RunConflictError),
        stop=lambda _: time.monotonic() > deadline,
        wait=tenacity.wait_fixed(_LOOK_S),
        sleep=pause,
        reraise=True,
    )(refuse_while_executing, context.store, context.run.name)
