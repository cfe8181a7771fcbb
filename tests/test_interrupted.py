"""A signal behind an error ends the command as the signal would, whatever the error is."""

from __future__ import annotations

import signal

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
