"""Records the operations of this process on a folder, by an audit hook; and disks that refuse them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = ("os.mkdir", "os.rename", "os.link", "os.symlink", "os.remove", "os.rmdir", "os.truncate", "os.utime")
#: The folders that are looked at, each with what hears of it; a hook can never be taken off.
_looked_at: dict[str, Callable[[str, str], object]] = {}
_hooked: list[bool] = []


@contextmanager
def writes_below(folder: str) -> Iterator[list[str]]:
    """Give the list that what is done to files and folders below a folder is added to."""
    found: list[str] = []
    with _hearing(folder, lambda event, place: found.append(f"{event} {place}")):
        yield found


@contextmanager
def failing_below(folder: str, number: int) -> Iterator[None]:
    """Let everything that would change something below a folder fail with an error of the operating system."""

    def fail(event: str, place: str) -> None:
        raise OSError(number, os.strerror(number), place)

    with _hearing(folder, fail):
        yield


@contextmanager
def _hearing(folder: str, hears: Callable[[str, str], object]) -> Iterator[None]:
    if not _hooked:
        sys.addaudithook(_hear)
        _hooked.append(True)
    _looked_at[folder] = hears
    try:
        yield
    finally:
        del _looked_at[folder]


def _hear(event: str, given: tuple[Any, ...]) -> None:
    if not _looked_at:
        return
    if event == "open":
        if not given[2] & _WRITING:
            return
    elif event == "sqlite3.connect":
        if "mode=ro" in str(given[0]):
            return
    elif event not in _CHANGES:
        return
    for folder, hears in list(_looked_at.items()):
        for place in given:
            if folder in str(place):
                hears(event, str(place))
                break
