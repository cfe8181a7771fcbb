"""A cache of the values last requested, limited by their sizes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any


class SizedCache(OrderedDict[Any, Any]):
    """The values last requested, created when they are missing."""

    def __init__(self, most: int, size: Callable[[Any], int] = lambda value: 1) -> None:
        """Limit the sum of the sizes of all values, by default their number."""
        super().__init__()
        self._most, self._size, self._sum, self._lock = most, size, 0, threading.RLock()

    def of(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the value of a key."""
        with self._lock:
            if key not in self:
                self[key] = make()
                self._sum += self._size(self[key])
                while self._sum > self._most and len(self) > 1:
                    self._sum -= self._size(self.popitem(last=False)[1])
            self.move_to_end(key)
            return self[key]
