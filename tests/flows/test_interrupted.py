"""A signal behind an error ends the command as the signal would, with any error."""

from __future__ import annotations

import _imp
import importlib
import os
import signal
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.exceptions import TerminationSignal
from prefect.states import Cancelling, Running

from flowmill.configs.errors import CancelledError
from flowmill.configs.exits import StopSignal
from flowmill.flows import cancellation, scheduled_runs, sweep
from flowmill.flows.cli import signals
from flowmill.flows.cli.error_reporting import report_errors
from flowmill.flows.cli.signals import terminable
from flowmill.flows.requests import PipelineRequest, SweepRequest
from flowmill.flows.run_in_process import stop_if_interrupted


@pytest.fixture
def listening() -> Iterator[None]:
    """Hear Ctrl-C, which shells have their background jobs ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def write_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], object]:
    """Writes a module of a name and a text, which can be imported."""
    monkeypatch.syspath_prepend(tmp_path)
    return lambda name, text: (tmp_path / f"{name}.py").write_text(text)


def behind(cause: BaseException) -> ValueError:
    """Return an error whose context is another, as clean-up code leaves it."""
    try:
        try:
            raise cause
        finally:
            raise ValueError("Task run is not set")
    except ValueError as error:
        return error


def test_a_termination_behind_an_error() -> None:
    with pytest.raises(SystemExit) as stopped:
        stop_if_interrupted(behind(TerminationSignal(signal=signal.SIGTERM)))
    assert stopped.value.code == 143


def test_a_flow_that_its_worker_cancels_logs_no_traceback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(scheduled_runs, "is_called", lambda: False)
    cause = TerminationSignal(signal=signal.SIGTERM)
    with pytest.raises(TerminationSignal) as ended, scheduled_runs.scheduled(PipelineRequest(config="digits")):
        raise behind(cause)
    assert ended.value is cause
    assert caplog.records == []


@pytest.mark.usefixtures("listening")
def test_ctrl_c_behind_an_error() -> None:
    for cause in (StopSignal(130), KeyboardInterrupt()):
        with pytest.raises(type(cause)) as stopped:
            stop_if_interrupted(behind(cause))
        assert stopped.value is cause


@pytest.mark.usefixtures("listening")
def test_a_signal_lets_an_import_end_first(write_module: Callable[[str, str], object]) -> None:
    """Libraries in C++ abort the process when an exception comes out of what they import."""
    text = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(0.3)\nwhole = True\n"
    write_module("slowly_imported", text)
    with pytest.raises(SystemExit) as stopped, terminable():
        time.sleep(10 * import_module("slowly_imported").whole)
    assert stopped.value.code == 130
    assert sys.modules["slowly_imported"].whole


@pytest.mark.usefixtures("listening")
@pytest.mark.parametrize("seconds", [10, 0], ids=["with work left", "in the last moment"])
def test_a_signal_that_comes_in_a_callback_of_the_garbage_collector_is_not_lost(seconds: int) -> None:
    class Collected:
        pass

    went_on = []

    def work() -> None:
        collected = Collected()
        watched = weakref.ref(collected, lambda _: os.kill(os.getpid(), signal.SIGINT))
        del collected
        went_on.append(watched())
        time.sleep(seconds)

    with pytest.raises(SystemExit) as stopped, terminable():
        work()
    assert stopped.value.code == 130
    assert went_on == [None]
    # What was to come again comes to nobody else.
    with terminable():
        time.sleep(0.1)


@pytest.mark.usefixtures("listening")
def test_a_signal_that_code_drops_comes_again(
    write_module: Callable[[str, str], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries have a bare ``except`` around their optional imports, which may take longer than a signal waits."""
    monkeypatch.setattr(signals, "_PATIENCE_S", 0.0)
    text = "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept:\n    dropped = True\n"
    write_module("carelessly_imported", text)
    with pytest.raises(SystemExit) as stopped, terminable():
        time.sleep(10 * import_module("carelessly_imported").dropped)
    assert stopped.value.code == 130
    # A signal that ended a command does not come again.
    del stopped
    with terminable():
        time.sleep(0.1)


@pytest.mark.usefixtures("listening")
def test_a_signal_leaves_the_import_system_usable(
    write_module: Callable[[str, str], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exit between the acquisition of its lock and the block that releases it makes other threads wait forever."""
    monkeypatch.setattr(signals, "_PATIENCE_S", 0.0)
    write_module("plainly_imported", "")
    signaled: list[int] = []

    def acquire() -> None:
        _imp.acquire_lock()
        if not signaled:
            signaled.append(signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    system = SimpleNamespace(**{**vars(_imp), "acquire_lock": acquire})
    monkeypatch.setattr(importlib._bootstrap, "_imp", system)  # type: ignore[attr-defined]
    with pytest.raises(SystemExit) as stopped, terminable():
        time.sleep(10 * bool(import_module("plainly_imported")))
    assert signaled
    assert stopped.value.code == 130
    assert not _imp.lock_held()


def test_a_variant_at_work_stops_when_its_sweep_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    current, asked, cancelled = SimpleNamespace(id="sweep"), list[str](), set[str]()

    def read_flow_run(each: str) -> Any:
        asked.append(each)
        return SimpleNamespace(state=Cancelling() if each in cancelled else Running())

    def look() -> list[str]:
        """Return the flow runs that are asked for two seconds later."""
        asked.clear()
        cancellation._last.clear()
        cancellation.check_cancelled()
        return [*asked]

    def variants(request: SweepRequest) -> None:
        current.id = "variant"
        assert look() == ["sweep", "variant"]
        cancellation.check_cancelled()
        assert asked == ["sweep", "variant"], "each once in two seconds"
        cancelled.add("sweep")
        with pytest.raises(CancelledError):
            look()

    client = SimpleNamespace(read_flow_run=read_flow_run)
    monkeypatch.setattr(cancellation, "_last", {})
    monkeypatch.setattr(cancellation, "flow_run", current)
    monkeypatch.setattr(cancellation, "has_lasting_api", lambda: True)
    monkeypatch.setattr(cancellation, "get_client", lambda sync_client: nullcontext(client))
    monkeypatch.setattr(sweep, "make_up_for_missed", lambda: None)
    monkeypatch.setattr(sweep, "_sweep", variants)
    sweep.sweep.fn(SweepRequest(config="digits"))
    assert look() == ["variant"]


def test_a_stopped_sweep_says_how_to_go_on(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["flowmill", "sweep", "digits", "--grid", "run.seed=1,2"])
    with pytest.raises(StopSignal), report_errors():
        raise StopSignal(143)
    assert "the same command again:\n  flowmill sweep digits --grid run.seed=1,2\n" in capsys.readouterr().err


def test_an_error_alone_is_not_an_interruption() -> None:
    stop_if_interrupted(behind(RuntimeError("a bug")))


@pytest.mark.parametrize(
    ("cause", "expected"),
    [
        (KeyboardInterrupt(), "KILLED"),
        (StopSignal(143), "KILLED"),
        (SystemExit(143), "FAILED"),
        (RuntimeError("a bug"), "FAILED"),
    ],
)
@pytest.mark.usefixtures("listening")
def test_a_run_that_a_signal_ends_is_told_as_killed_whatever_came_of_it(
    cause: BaseException, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flowmill.flows import pipeline

    reported: list[str] = []
    noted: list[str] = []

    monkeypatch.setattr(pipeline, "RunCallbacks", lambda context, tracker, show: None)
    monkeypatch.setattr(pipeline, "turn", lambda context, request: nullcontext())
    monkeypatch.setattr(pipeline, "check_plan", lambda plan, rewards: None)
    monkeypatch.setattr(pipeline, "note_state", lambda context, state, *about, **more: noted.append(state))
    monkeypatch.setattr(pipeline, "executing", lambda context: nullcontext())
    monkeypatch.setattr(pipeline.process_state, "opened", lambda context: nullcontext())
    monkeypatch.setattr(pipeline, "flow_run_tags", dict)
    monkeypatch.setattr(pipeline, "Tracker", lambda context, orchestrator: SimpleNamespace(close=reported.append))
    context: Any = SimpleNamespace(plan=None)
    with pytest.raises(type(behind(cause))), pipeline.training_run(context, PipelineRequest(config="digits")):
        raise behind(cause)
    assert reported == [expected]
    assert noted == ["running", {"KILLED": "stopped", "FAILED": "failed"}[expected]]
