"""Signals turned into an orderly end of a command, wherever they meet it."""

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

#: Exit codes of the signals that stop a command in an orderly way, and what sends them.
STOPPED = {128 + signal.SIGINT: "Ctrl-C", 128 + signal.SIGTERM: "SIGTERM"}
#: How long an import may hold up a signal; a library takes seconds, a module of the user's may do anything.
_PATIENCE_S = 10.0
#: When each signal first came.
_waiting: dict[int, float] = {}
#: Signals that came and are to come again, with what sends them.
_due: dict[int, threading.Timer] = {}


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Turn Ctrl-C and SIGTERM into an orderly exit, which carries what there is to say about it.

    Ctrl-C too, as Python's own exception for it is told apart by more than who catches it: click takes it for a wish to
    abort, and once it passed a string of code that is executed, as in the making of a dataclass, the interpreter ends
    as if nobody had caught it.
    """
    # A signal that is ignored, as shells have it for what they start in the background, stays ignored.
    numbers = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.signal(number, _stop) for number in numbers}
    hook, sys.unraisablehook = sys.unraisablehook, _not_lost(sys.unraisablehook)
    try:
        yield
        # What came in the last moment has nothing left to interrupt, and is an end by a signal nevertheless.
        for number in sorted(_due):
            sys.exit(128 + number)
    finally:
        for again in _due.values():
            again.cancel()
        _due.clear()
        sys.unraisablehook = hook
        for number, handler in previous.items():
            signal.signal(number, handler)


def _stop(number: int, frame: FrameType | None) -> None:
    """Exit, but not in the middle of an import: libraries in C++ abort when their start meets an exception."""
    began = _waiting.setdefault(number, time.monotonic())
    if _imports(frame) and time.monotonic() - began < _PATIENCE_S:
        _send_again(number)
        return
    del _waiting[number]
    _due.pop(number, None)
    sys.exit(128 + number)


def _not_lost(hook: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Return a hook that has a signal sent again whose exit was raised where Python drops exceptions.

    In callbacks of the garbage collector, say: a signal that comes while it works is handled in the first of them.
    """

    def look(unraisable: Any) -> None:
        end = unraisable.exc_value
        if isinstance(end, SystemExit) and end.code in STOPPED:
            _send_again(int(end.code or 0) - 128)
        else:
            hook(unraisable)

    return look


def _send_again(number: int) -> None:
    """Send a signal to this process once it has gone on a little."""
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
