"""Calls of libraries that may never return, in threads that their callers need not wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_Result = TypeVar("_Result")


def in_background(work: Callable[[], _Result], name: str) -> Future[_Result]:
    """Return the future result of work in a daemon thread, which keeps no process from its end.

    Args:
        work: the work.
        name: name of the thread.
    """
    future: Future[_Result] = Future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - the caller receives it
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, daemon=True, name=name).start()
    return future
