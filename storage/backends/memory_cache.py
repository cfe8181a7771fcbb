"""Bytes a process has read or written: files that are created once and never change are not requested again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable


class Known:
    """Bytes by path, the last used ones; a missing path is never cached, as another process may create it."""

    def __init__(self, *, limit: int, largest: int) -> None:
        """Start with none.

        Args:
            limit: bytes to keep at most.
            largest: bytes of one object at most; larger ones are not kept.
        """
        self._limit, self._largest = limit, largest
        self._objects: OrderedDict[str, bytes] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def get(self, path: str) -> bytes | None:
        """Return an object, None if it is not known."""
        with self._lock:
            if path in self._objects:
                self._objects.move_to_end(path)
            return self._objects.get(path)

    def add(self, path: str, data: bytes | None) -> None:
        """Remember an object; those used longest ago go when there are too many bytes."""
        if data is None or len(data) > self._largest:
            return
        with self._lock:
            self._forget([path])
            self._objects[path] = data
            self._size += len(data)
            while self._size > self._limit:
                self._forget([next(iter(self._objects))])

    def forget(self, path: str) -> None:
        """Forget an object, and everything below a folder of that name."""
        with self._lock:
            self._forget([name for name in self._objects if name == path or name.startswith(f"{path}/")])

    def _forget(self, paths: Iterable[str]) -> None:
        for path in paths:
            self._size -= len(self._objects.pop(path, b""))
