"""Requests of one batch to an engine, several at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def mapped(ask: Callable[[T], R], items: Sequence[T], threads: int) -> list[R]:
    """Return the answers for items, in order. After an error of one, no further request begins; it is raised."""
    pool = ThreadPoolExecutor(min(threads, len(items)), thread_name_prefix="engine")
    stopped = threading.Event()

    def one(item: T) -> list[R]:
        if stopped.is_set():
            return []
        try:
            return [ask(item)]
        except BaseException:
            stopped.set()
            raise

    try:
        # If one was skipped, the error of another is raised here.
        return [answer for answers in list(pool.map(one, items)) for answer in answers]
    finally:
        pool.shutdown(cancel_futures=True)
