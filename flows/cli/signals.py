"""Turns signals into an orderly exit of a command."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from flowmill.configs.exits import StopSignal

#: Exit codes of the signals that stop a command in an orderly way, and their names.
STOPPED = {128 + signal.SIGINT: "Ctrl-C", 128 + signal.SIGTERM: "SIGTERM"}
#: Maximum delay of a signal by an import: libraries take seconds, a user's module may take forever.
_PATIENCE_S = 10.0
#: Time of the first arrival of each deferred signal.
_waiting: dict[int, float] = {}
#: Timers that send deferred signals again.
_due: dict[int, threading.Timer] = {}


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Turn Ctrl-C and SIGTERM into StopSignal, whose notes carry messages for the user.

    KeyboardInterrupt is unsuitable for Ctrl-C: click turns it into an abort, and once it has passed through ``exec`` of
    a string, as in the creation of a dataclass, the interpreter exits as if it were uncaught.
    """
    # An ignored signal stays ignored; shells ignore SIGINT in background processes.
    numbers = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.signal(number, _stop) for number in numbers}
    hook, sys.unraisablehook = sys.unraisablehook, _not_lost(sys.unraisablehook)
    try:
        yield
        # A signal deferred until the end has no work left to interrupt, but still determines the exit code.
        for number in sorted(_due):
            raise StopSignal(128 + number)
    finally:
        for again in _due.values():
            again.cancel()
        _due.clear()
        sys.unraisablehook = hook
        for number, handler in previous.items():
            signal.signal(number, handler)


def _stop(number: int, frame: FrameType | None) -> None:
    """Exit, but not during an import: C++ libraries abort if an exception interrupts their initialization."""
    began = _waiting.setdefault(number, time.monotonic())
    if _imports(frame) and time.monotonic() - began < _PATIENCE_S:
        _send_again(number)
        return
    del _waiting[number]
    _due.pop(number, None)
    raise StopSignal(128 + number)


def _not_lost(hook: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Return an unraisable hook that sends a signal again if Python dropped its exit, as in a callback of the GC."""

    def look(unraisable: Any) -> None:
        end = unraisable.exc_value
        if isinstance(end, StopSignal):
            _send_again(int(end.code or 0) - 128)
        else:
            hook(unraisable)

    return look


def _send_again(number: int) -> None:
    again = threading.Timer(0.05, os.kill, (os.getpid(), number))
    again.daemon = True
    _due[number] = again
    again.start()


def _imports(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False
