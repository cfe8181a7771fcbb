"""Turns signals into an orderly exit of a command."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from flowmill.configs.exits import StopSignal

#: Exit codes of the signals that stop a command in an orderly way, and their names.
STOPPED = {128 + signal.SIGINT: "Ctrl-C", 128 + signal.SIGTERM: "SIGTERM"}
#: Maximum delay of a signal by an import: libraries take seconds, a user's module may take forever.
_PATIENCE_S = 10.0
#: Function of the import system that executes a module.
_IMPORTED_CODE = "_call_with_frames_removed"
#: Time of the first arrival of each deferred signal.
_waiting: dict[int, float] = {}
#: Timers that send deferred signals again.
_due: dict[int, threading.Timer] = {}
#: Each watches an exit: one that goes away before it ends the command was dropped.
_exits: list[weakref.finalize[[int], StopSignal]] = []


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Turn Ctrl-C and SIGTERM into StopSignal, whose notes carry messages for the user.

    KeyboardInterrupt is unsuitable for Ctrl-C: click turns it into an abort, and once it has passed through ``exec`` of
    a string, as in the creation of a dataclass, the interpreter exits as if it were uncaught.
    """
    # An ignored signal stays ignored; shells ignore SIGINT in background processes.
    numbers = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.signal(number, _stop) for number in numbers}
    hook, sys.unraisablehook = sys.unraisablehook, _without_exits(sys.unraisablehook)
    try:
        yield
        # A signal deferred until the end has no work left to interrupt, but still determines the exit code.
        for number in sorted(_due):
            raise StopSignal(128 + number)
    finally:
        for watch in _exits:
            watch.detach()
        _exits.clear()
        for again in _due.values():
            again.cancel()
        _due.clear()
        sys.unraisablehook = hook
        for number, handler in previous.items():
            signal.signal(number, handler)


def _stop(number: int, frame: FrameType | None) -> None:
    """Exit, but not during an import: C++ libraries abort if an exception interrupts their initialization.

    Code may drop an exit, as a callback of the GC or a bare ``except`` does; then the signal is sent again.
    """
    began = _waiting.setdefault(number, time.monotonic())
    importing = _importing(frame)
    # Where the import system itself works, an exit would keep its lock forever.
    if importing and (importing != _IMPORTED_CODE or time.monotonic() - began < _PATIENCE_S):
        _send_again(number)
        return
    del _waiting[number]
    _due.pop(number, None)
    raise _watched(number)


def _watched(number: int) -> StopSignal:
    # A name in the frame that raises it would keep it.
    end = StopSignal(128 + number)
    _exits.append(weakref.finalize(end, _send_again, number))
    return end


def _without_exits(hook: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Return an unraisable hook that prints nothing of exits."""

    def look(unraisable: Any) -> None:
        if not isinstance(unraisable.exc_value, StopSignal):
            hook(unraisable)

    return look


def _send_again(number: int) -> None:
    again = threading.Timer(0.05, os.kill, (os.getpid(), number))
    again.daemon = True
    _due[number] = again
    again.start()


def _importing(frame: FrameType | None) -> str | None:
    """Return the innermost function of the import system that is at work, or None."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return frame.f_code.co_name
        frame = frame.f_back
    return None
