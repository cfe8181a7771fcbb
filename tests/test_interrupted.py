"""A signal behind an error ends the command as the signal would, whatever the error is."""

from __future__ import annotations

import signal
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from prefect.exceptions import TerminationSignal

from flows.cli.run import _stop_if_interrupted


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
        _stop_if_interrupted(behind(TerminationSignal(signal=signal.SIGTERM)))
    assert stopped.value.code == 143


def test_ctrl_c_behind_an_error() -> None:
    with pytest.raises(KeyboardInterrupt):
        _stop_if_interrupted(behind(KeyboardInterrupt()))


def test_an_error_alone_is_not_an_interruption() -> None:
    _stop_if_interrupted(behind(RuntimeError("a bug")))


@pytest.mark.parametrize(
    ("cause", "expected"),
    [(KeyboardInterrupt(), "KILLED"), (SystemExit(143), "KILLED"), (RuntimeError("a bug"), "FAILED")],
)
def test_a_run_that_a_signal_ends_is_told_as_killed_whatever_came_of_it(
    cause: BaseException, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows import pipeline

    told: list[str] = []

    def stumbles(context: object, tracker: object) -> None:
        raise behind(cause)

    monkeypatch.setattr(pipeline, "train", stumbles)
    monkeypatch.setattr(pipeline, "executing", lambda context: nullcontext())
    monkeypatch.setattr(pipeline.runtime, "opened", lambda context: nullcontext())
    monkeypatch.setattr(pipeline, "flow_run_tags", dict)
    monkeypatch.setattr(pipeline, "Tracker", lambda context, orchestrator: SimpleNamespace(close=told.append))
    with pytest.raises(type(behind(cause))):
        pipeline.carry_out(SimpleNamespace())  # type: ignore[arg-type]
    assert told == [expected]
