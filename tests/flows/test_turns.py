"""Flows that wait: for a run that is busy, and for GPUs that are shared."""

from __future__ import annotations

import ast
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State, StateType
from prefect.settings import PREFECT_API_URL, get_current_settings, temporary_settings
from prefect.states import Running

from flowmill.configs.errors import CancelledError, ConfigError, FlowmillError, RunConflictError
from flowmill.configs.schema import RunConfig
from flowmill.flows import scheduled_runs, stages
from flowmill.flows.pipeline import pipeline
from flowmill.flows.requests import GPU_SLOTS, StageRequest
from flowmill.flows.run_in_process import on_server, outcome
from flowmill.flows.scheduled_runs import end_lost, turn
from flowmill.flows.stages import FLOWS
from flowmill.storage.backends.process_tags import is_gone, tag
from flowmill.tasks.runs import state
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runs.state import note_flow_run, note_state
from tests.conftest import ROOT
from tests.support.inside import prepare

pytestmark = pytest.mark.slow

Make = Callable[..., RunConfig]


@pytest.fixture
def context(make_config: Make, prefect_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunContext]:
    monkeypatch.setattr(scheduled_runs, "_LOOK_S", 0.05)
    with temporary_settings({PREFECT_API_URL: prefect_server}):
        yield prepare(make_config())


def asked(**given: float) -> StageRequest:
    return StageRequest.model_validate({"run": "small", **given})


def busy(context: RunContext, seconds: float) -> threading.Thread:
    """Return a thread that executes the run, as another process would, from now on for some seconds."""
    begun = threading.Event()

    def execute() -> None:
        with context.store.root.lock(context.run.lock_path, "Run 'small'"):
            begun.set()
            time.sleep(seconds)

    thread = threading.Thread(target=execute)
    thread.start()
    begun.wait()
    return thread


def test_a_flow_waits_for_its_run_as_long_as_it_may(context: RunContext) -> None:
    other = busy(context, 1.0)
    with pytest.raises(RunConflictError), turn(context, asked(wait_minutes=0.1 / 60)):
        pass
    assert other.is_alive()
    with turn(context, asked(wait_minutes=1)):
        assert not other.is_alive()


def test_no_other_process_works_on_a_run_during_a_stage(context: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    locked = []

    def looked(*values: Any, **options: Any) -> Any:
        locked.append(context.store.root.locked(context.run.lock_path))
        raise ConfigError("seen")

    monkeypatch.setattr(stages, "run_stage", looked)
    request = StageRequest(run="small", root=context.store.root.uri, epoch=1)
    with pytest.raises(ConfigError, match="seen"):
        stages._run_stage("rollout", request)
    assert locked == [True]
    assert not context.store.root.locked(context.run.lock_path)


def test_a_flow_waits_again_for_a_run_that_began_while_it_waited_for_gpus(
    context: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[threading.Thread] = []

    @contextmanager
    def slots(*values: Any, **options: Any) -> Iterator[None]:
        if not begun:
            begun.append(busy(context, 0.5))
        yield

    monkeypatch.setattr(scheduled_runs, "_require_slots", lambda count: None)
    monkeypatch.setattr(scheduled_runs, "concurrency", slots)
    with turn(context, asked(wait_minutes=1, gpu_slots=1)):
        assert not begun[0].is_alive()
        assert context.store.root.locked(context.run.lock_path)
    begun.clear()
    with pytest.raises(RunConflictError), turn(context, asked(gpu_slots=1)):
        pass
    begun[0].join()


def test_gpus_are_shared_by_a_limit_that_must_be_there(context: RunContext) -> None:
    with get_client(sync_client=True) as client:
        said = r"gpu_slots is 2, but .*'flowmill-gpu' has 0.*flowmill deploy --gpu-slots"
        with pytest.raises(ConfigError, match=said), turn(context, asked(gpu_slots=2)):
            pass
        client.upsert_global_concurrency_limit_by_name(GPU_SLOTS, 2)
        try:
            with turn(context, asked(gpu_slots=2)):
                assert client.read_global_concurrency_limit_by_name(GPU_SLOTS).active_slots == 2
            assert client.read_global_concurrency_limit_by_name(GPU_SLOTS).active_slots == 0
            with pytest.raises(ConfigError, match=r"gpu_slots is 3, but .* has 2"), turn(context, asked(gpu_slots=3)):
                pass
        finally:
            client.delete_global_concurrency_limit_by_name(GPU_SLOTS)


def test_a_flow_run_that_is_cancelled_before_it_begins_ends(context: RunContext) -> None:
    with get_client(sync_client=True) as client:
        cancelled = client.create_flow_run(pipeline, state=Running()).id
        client.set_flow_run_state(cancelled, State(type=StateType.CANCELLING), force=True)
        state = client.read_flow_run(cancelled).state
        assert state is not None
        with pytest.raises(CancelledError, match="before it began"):
            outcome(state)
        state = client.read_flow_run(cancelled).state
    assert state is not None
    assert state.type == StateType.CANCELLED


def test_an_error_of_user_code_is_said_with_its_line() -> None:
    state: State[Any]
    try:
        state = State(type=StateType.COMPLETED, data={}["missing"])
    except KeyError as error:
        state = State(type=StateType.FAILED, data=error)
    with pytest.raises(FlowmillError, match=r"KeyError: 'missing'\. '.*test_turns.py', line \d+, raised it"):
        outcome(state)


def test_a_killed_flow_run_ends_when_another_of_its_run_begins(context: RunContext) -> None:
    with get_client(sync_client=True) as client:

        def state_of(each: UUID) -> StateType | None:
            state = client.read_flow_run(each).state
            return state.type if state is not None else None

        dead, done = (client.create_flow_run(pipeline, state=Running()).id for _ in range(2))
        note_state(context, "running", flow_run=str(done))
        note_state(context, "done")
        end_lost(context)
        for name in ("no id", str(uuid4()), str(dead)):
            note_state(context, "running", flow_run=name)
            with context.store.root.lock(context.run.lock_path, "Run 'small'"):
                end_lost(context)
            assert state_of(dead) == StateType.RUNNING
            # Any flow of the run: this is of a stage.
            with turn(context, asked()):
                pass
        assert (state_of(dead), state_of(done)) == (StateType.CRASHED, StateType.RUNNING)


def test_a_flow_run_whose_process_is_gone_ends_with_the_next(
    context: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was killed before it executed the run, or its server was gone at its end."""
    host, machine, *_ = tag().split("~")
    gone = "~".join((host, machine, str(2**22 + 1), "1", "0"))
    with get_client(sync_client=True) as client:
        lost, alive, again = (client.create_flow_run(pipeline, state=Running()).id for _ in range(3))
        note_flow_run(context, str(alive))
        with monkeypatch.context() as dead:
            dead.setattr(state, "tag", lambda: gone)
            for each in (lost, again):
                note_flow_run(context, str(each))
        # Prefect started it again, in this process.
        note_flow_run(context, str(again))
        note_state(context, "failed")
        end_lost(context)
        states = [client.read_flow_run(each).state for each in (lost, alive, again)]
    assert [each and each.type for each in states] == [StateType.CRASHED, StateType.RUNNING, StateType.RUNNING]


def test_a_flow_run_is_recorded_with_its_process(context: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduled_runs, "flow_run", SimpleNamespace(id=str(uuid4())))
    with turn(context, asked()):
        pass
    note = context.run.newest("flow_runs")
    assert note is not None
    assert note["flow_run"] == scheduled_runs.flow_run.id
    assert not is_gone(note["process"])


def test_flow_runs_on_a_lasting_server_send_heartbeats() -> None:
    with on_server(None):
        assert get_current_settings().flows.heartbeat_frequency
    temporary: Any = SimpleNamespace(wait=lambda: "http://127.0.0.1:1/api")
    with on_server(temporary):
        assert get_current_settings().flows.heartbeat_frequency is None


def test_a_known_mistake_is_a_message(context: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduled_runs, "is_called", lambda: False)
    root = context.store.root.uri
    state = FLOWS["optimize"](StageRequest(run="small", root=root, epoch=5), return_state=True)
    assert state.is_failed()
    assert state.message == (
        "Run 'small' has no optimize for epoch 4: 0 of its 2 epochs are trained. Train it further: "
        f"flowmill run CONFIG --name small --set run.epochs=4 --root {root}\n"
        f"Committed data stays. To go on: flowmill stage optimize --run small --root {root} --epoch 5"
    )
    for logger in ("prefect.flow_runs", "prefect.engine"):
        logging.getLogger(logger).removeFilter(scheduled_runs._is_news)


def test_a_server_that_fails_before_the_work_is_a_message(context: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(**how: object) -> None:
        raise ConnectionError("no server")

    monkeypatch.setattr(scheduled_runs, "is_called", lambda: False)
    monkeypatch.setattr(scheduled_runs, "get_client", unreachable)
    root = context.store.root.uri
    state = FLOWS["optimize"](StageRequest(run="small", root=root, epoch=1), return_state=True)
    assert state.is_failed()
    assert "no server" in str(state.message)
    assert str(state.message).endswith(f"To go on: flowmill stage optimize --run small --root {root} --epoch 1")
    for logger in ("prefect.flow_runs", "prefect.engine"):
        logging.getLogger(logger).removeFilter(scheduled_runs._is_news)


def test_a_tick_makes_up_for_those_with_its_work_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    deployment, own, due = uuid4(), {"run": "a", "epoch": 1}, {"run": "a", "epoch": 2}

    def tick(request: dict[str, Any], *, planned: bool = True) -> Any:
        same = {"name": "small", "deployment_id": deployment, "auto_scheduled": planned}
        return SimpleNamespace(id=str(uuid4()), parameters={"request": request}, **same)

    ticks = [tick(own), tick(own), tick(due), tick({"run": "b", "epoch": 1}), tick(own, planned=False), tick({})]
    ended: list[str] = []
    client = SimpleNamespace(
        read_flow_run=lambda flow_run: ticks[0],
        read_flow_runs=lambda **filters: ticks,
        set_flow_run_state=lambda flow_run, state, force: ended.append(flow_run),
    )
    monkeypatch.setattr(scheduled_runs, "get_client", lambda sync_client: nullcontext(client))
    monkeypatch.setattr(scheduled_runs, "flow_run", SimpleNamespace(id=ticks[0].id))
    monkeypatch.setattr(scheduled_runs, "is_called", lambda: False)
    scheduled_runs.make_up_for_missed()
    assert ended == [ticks[1].id]


def test_every_scheduled_flow_first_makes_up_for_missed_ticks() -> None:
    found = [
        ast.unparse(node.body[0])
        for path in sorted((ROOT / "flows").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.With) and "scheduled(request)" in ast.unparse(node.items[0])
    ]
    assert found == ["make_up_for_missed()"] * 4
