"""When Python looks for garbage among its objects.

Imports of large libraries make a million objects, none of them garbage. To go through them again and again while there
come more takes a third of the time to start.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

RARELY = (200_000, 50, 50)
"""Thresholds of a process whose objects are mostly modules."""
_USUALLY = gc.get_threshold()


def collect_rarely() -> None:
    """Look for garbage rarely, from now on."""
    gc.set_threshold(*RARELY)


def collect_as_usual() -> None:
    """Collect garbage at Python's own rate, among objects made from now on."""
    gc.freeze()
    gc.set_threshold(*_USUALLY)


@contextmanager
def without_collecting() -> Iterator[None]:
    """Look for no garbage inside."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@contextmanager
def starting() -> Iterator[None]:
    """Collect no garbage inside; objects alive at the end are excluded from later collections."""
    with without_collecting():
        yield
        gc.freeze()
