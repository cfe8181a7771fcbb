"""Flows under a Prefect worker: missed ticks, busy runs, shared GPUs, and failures."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import httpx
import tenacity
from prefect import get_run_logger
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterId,
    FlowRunFilter,
    FlowRunFilterExpectedStartTime,
    FlowRunFilterId,
    FlowRunFilterState,
    FlowRunFilterStateName,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import State, StateType
from prefect.concurrency.sync import concurrency
from prefect.exceptions import FailedRun, ObjectNotFound, PrefectException
from prefect.runtime import deployment, flow_run
from prefect.states import Cancelled, Completed, Crashed, Failed

from flowmill.configs.errors import CancelledError, ConfigError, FlowmillError, RunConflictError, in_words
from flowmill.flows.cancellation import check_cancelled, signal_behind
from flowmill.flows.process_state import is_called
from flowmill.flows.requests import GPU_SLOTS, Request
from flowmill.flows.server import has_lasting_api
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runs.locks import holding, refuse_while_executing
from flowmill.tasks.runs.state import lost_flow_runs, note_flow_run

_LOOK_S = 5.0
#: Loggers of Prefect's engine.
_ENGINE = ("prefect.flow_runs", "prefect.engine")
#: States in which a scheduled flow run waits for its process; one that awaits a retry has begun.
_NOT_BEGUN = ["Scheduled", "Late", "AwaitingConcurrencySlot"]


@dataclass
class FlowResult:
    """The result of a flow."""

    value: Any = None
    """The return value of the flow's function: the result, or a state of Prefect."""


@contextlib.contextmanager
def scheduled(request: Request) -> Iterator[FlowResult]:
    """Fail with a message that names the command to continue.

    The flow sets the value inside the block, and returns it afterwards. An error inside sets a failed or cancelled
    state; if a program called the flow, errors propagate unchanged to it.
    """
    result = FlowResult()
    try:
        yield result
    except CancelledError as error:
        result.value = Cancelled(message=str(error))
    except Exception as error:
        if is_called():
            raise
        # A worker ends the process of a cancelled flow run with a signal, which may surface as another error.
        if (stopped := signal_behind(error)) is not None:
            raise stopped from None
        result.value = _failed(error, request)


def _failed(error: Exception, request: Request) -> State[Any]:
    """Log the error and the command to continue, and return both as the state of the flow run."""
    expected = isinstance(error, FlowmillError)
    cause = str(error) if expected else in_words(error)
    command = request.command(str(flow_run.flow_name), deployment.name)
    message = f"{cause}\nCommitted data stays. To go on: {command}"
    # The traceback helps with a bug, possibly in a user's reward, and with a lost connection.
    get_run_logger().error(message, exc_info=not expected)
    for logger in _ENGINE:
        # The engine would log the failure's traceback again.
        logging.getLogger(logger).addFilter(_is_news)
    return Failed(message=message)


def _is_news(record: logging.LogRecord) -> bool:
    """Return whether a record is not the traceback of a failure that was already logged."""
    return not (record.exc_info and isinstance(record.exc_info[1], FailedRun))


def make_up_for_missed() -> None:
    """End the other due scheduled flow runs of this deployment with equal parameters as ``Skipped``; this flow run does
    their work. Each schedule of a deployment may have parameters of its own.

    One run thus catches up on all ticks missed while no worker ran, or while a flow run outlasted the interval. A
    started run ends the waiting ones, not vice versa: if ticks came faster than processes start, every run would yield.
    """
    if is_called() or not flow_run.id:
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
            if other.auto_scheduled and other.id != own.id and other.parameters == own.parameters:
                skipped: State[None] = Completed(
                    name="Skipped", message=f"{own.name}, which began after this was due, does the work."
                )
                client.set_flow_run_state(other.id, skipped, force=True)


def end_lost(context: RunContext) -> None:
    """End flow runs of a run whose processes are gone as ``Crashed``: nothing else would end those of killed processes,
    and those whose server was gone at their end."""
    # Another server may have been named then; the run itself does not depend on this.
    with contextlib.suppress(FlowmillError, PrefectException, httpx.HTTPError):
        if not (names := lost_flow_runs(context)):
            return
        with get_client(sync_client=True) as client:
            # Most often there is none to look for. Under the lock no other process executes the run.
            if not _at_work(client, names):
                return
            with holding(context.store, context.run.name):
                for each in _at_work(client, lost_flow_runs(context)):
                    ended: State[None] = Crashed(message="Its process is gone. Another flow run goes on with its run.")
                    client.set_flow_run_state(each, ended, force=True)


def _at_work(client: SyncPrefectClient, names: Sequence[str]) -> list[UUID]:
    """Return those of some flow runs that are running for the server, without this process's own."""
    ids = []
    for name in names:
        with contextlib.suppress(ValueError):
            ids.append(UUID(name))
    if not ids:
        return []
    states = FlowRunFilterState(
        type=FlowRunFilterStateType(any_=[StateType.PENDING, StateType.RUNNING, StateType.CANCELLING])
    )
    flow_runs = client.read_flow_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=ids), state=states))
    return [each.id for each in flow_runs if str(each.id) != flow_run.id]


@contextlib.contextmanager
def turn(context: RunContext, request: Request) -> Iterator[None]:
    """Wait up to the requested time until no other process executes the run, and hold its lock and GPU slots inside the
    block."""
    if (lasting := has_lasting_api()) and flow_run.id:
        note_flow_run(context, str(flow_run.id))
    deadline = time.monotonic() + request.wait_minutes * 60
    while True:
        # Before the slots: a flow that waits for a run must not hold GPUs.
        _await_turn(context, deadline - time.monotonic())
        if lasting:
            end_lost(context)
        with contextlib.ExitStack() as stack:
            if request.gpu_slots:
                _require_slots(request.gpu_slots)
                stack.enter_context(concurrency(GPU_SLOTS, occupy=request.gpu_slots, strict=True))
            try:
                stack.enter_context(holding(context.store, context.run.name))
            except RunConflictError:
                # Another one began while this one waited for slots.
                if time.monotonic() > deadline:
                    raise
                continue
            yield
            return


def _require_slots(count: int) -> None:
    """Check that the server's limit is large enough; otherwise Prefect would admit all flows at once, or none."""
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
