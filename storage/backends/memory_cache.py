"""An in-memory cache of objects that a process has read or written, as committed objects never change."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable


class MemoryCache:
    """The most recently used objects by path; missing ones are not cached, as another process may create them."""

    def __init__(self, *, limit: int, largest: int) -> None:
        """Start empty.

        Args:
            limit: maximum total bytes.
            largest: maximum bytes of one object; larger ones are not cached.
        """
        self._limit, self._largest = limit, largest
        self._objects: OrderedDict[str, bytes] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def get(self, path: str) -> bytes | None:
        """Return an object, None if it is not cached."""
        with self._lock:
            if path in self._objects:
                self._objects.move_to_end(path)
            return self._objects.get(path)

    def add(self, path: str, data: bytes | None) -> None:
        """Cache an object; the least recently used ones are dropped when the limit is exceeded."""
        if data is None or len(data) > self._largest:
            return
        with self._lock:
            self._forget([path])
            self._objects[path] = data
            self._size += len(data)
            while self._size > self._limit:
                self._forget([next(iter(self._objects))])

    def forget(self, path: str) -> None:
        """Drop an object, or everything below a folder of that name."""
        with self._lock:
            self._forget([name for name in self._objects if name == path or name.startswith(f"{path}/")])

    def _forget(self, paths: Iterable[str]) -> None:
        for path in paths:
            self._size -= len(self._objects.pop(path, b""))
