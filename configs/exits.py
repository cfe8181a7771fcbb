"""Ends of the process, which a signal may cause, but not code of a component or a script; the place of its errors."""

from __future__ import annotations

import signal
import sysconfig
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flowmill.configs.errors import FlowmillError


class StopSignal(SystemExit):
    """Ctrl-C or SIGTERM ends this command, with the exit code of the signal."""


def is_interruption(error: BaseException) -> bool:
    """Return whether an error ends work from outside: a signal, or the end of a generator or task that runs it.

    All others are errors of the code that raised them, ``sys.exit()`` included.
    """
    # Other commands need not wait for its import.
    import asyncio

    if isinstance(error, KeyboardInterrupt):
        # Where another handler is set, or on another thread, Ctrl-C raises none.
        handles = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        return handles and threading.current_thread() is threading.main_thread()
    return isinstance(error, StopSignal | GeneratorExit | asyncio.CancelledError)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let Ctrl-C in a user's program wait until the end of the block, for imports: a library with compiled code, whose
    import it ends, cannot be imported again by the process.

    Raises:
        KeyboardInterrupt: at the end, if Ctrl-C came.
    """
    if threading.current_thread() is not threading.main_thread() or (
        signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    arrived: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: arrived.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if arrived:
        raise KeyboardInterrupt


@contextmanager
def without_exits(where: str, kind: type[FlowmillError] = FlowmillError) -> Iterator[None]:
    """Convert an exit that code inside asks for to an error that names it; a signal still ends the process.

    Args:
        where: the component or the work inside, for the message.
    """
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        if is_interruption(error):
            raise
        raise kind(
            f"{where}: {_place(error)} raised {type(error).__name__}: {error}, which would end the process without a "
            "message. Have it raise an error with the reason, and let a script read its arguments only under "
            "if __name__ == '__main__'. Committed data stays."
        ) from error


def _place(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return user_code(error) or f"'{last.filename}', line {last.lineno},"


def user_code(error: BaseException) -> str | None:
    """Return the file and line that raised an error, or called the library that did; None if they are flowmill's."""
    inside = tuple({*sysconfig.get_paths().values(), "<frozen"})
    frames = traceback.extract_tb(error.__traceback__)
    called = next((frame for frame in reversed(frames) if not frame.filename.startswith(inside)), None)
    if called is None or Path(__file__).parent.parent in Path(called.filename).parents:
        return None
    return f"'{called.filename}', line {called.lineno},"
