"""Tuning of Python's garbage collection.

Imports of large libraries create a million objects, none of them garbage. Scanning them repeatedly takes a third of the
start-up time.
"""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager

RARELY = (200_000, 50, 50)
"""Thresholds of a process whose objects are mostly modules."""
_USUALLY = gc.get_threshold()


def collect_rarely() -> None:
    """Collect garbage rarely from now on, and not at exit, where that takes a second with torch's modules."""
    gc.set_threshold(*RARELY)
    atexit.register(gc.freeze)


def collect_as_usual() -> None:
    """Collect garbage at Python's default rate, among objects created from now on."""
    gc.freeze()
    gc.set_threshold(*_USUALLY)


@contextmanager
def without_collecting() -> Iterator[None]:
    """Disable garbage collection inside the block."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@contextmanager
def starting() -> Iterator[None]:
    """Disable garbage collection inside the block; later collections exclude objects alive at its end."""
    with without_collecting():
        yield
        gc.freeze()
