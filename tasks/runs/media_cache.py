"""Cache of media that this process just stored losslessly, so that rewards need not decode them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable

import numpy as np

from flowmill.storage.layout import ArtifactRef

#: Most bytes to keep; the oldest shards are dropped first, and are decoded when requested.
_LIMIT = 128 << 20


class Recent:
    """Images or clips of the newest artifact of each kind, by shard; safe for several threads."""

    def __init__(self, limit: int = _LIMIT) -> None:
        """Start empty; ``limit`` is the most bytes to keep."""
        self._limit = limit
        self._shards: OrderedDict[tuple[ArtifactRef, str], list[np.ndarray]] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def begin(self, ref: ArtifactRef, shard: str, *, exact: bool) -> Callable[[Iterable[np.ndarray]], None]:
        """Return a function that caches a shard's next rows: (H, W, 3) images or (F, H, W, 3) clips, uint8.

        Args:
            ref: the artifact; other artifacts of its kind are dropped.
            shard: the shard; rows of an earlier attempt are dropped.
            exact: whether storage is lossless; otherwise no rows are cached.
        """
        key = (ref, shard)
        with self._lock:
            for cached in [*self._shards]:
                if cached == key or (cached[0].kind == ref.kind and cached[0] != ref):
                    self._drop(cached)
            if exact:
                self._shards[key] = []

        def add(media: Iterable[np.ndarray]) -> None:
            with self._lock:
                if key not in self._shards:
                    # Storage is not lossless, or the shard was dropped.
                    return
                new = [*media]
                self._shards[key] += new
                self._size += sum(each.nbytes for each in new)
                while self._size > self._limit:
                    self._drop(next(iter(self._shards)))

        return add

    def forget(self, ref: ArtifactRef, shard: str) -> None:
        """Drop a shard that another process has committed."""
        with self._lock:
            if (ref, shard) in self._shards:
                self._drop((ref, shard))

    def find(self, ref: ArtifactRef, shard: str, rows: int) -> list[np.ndarray] | None:
        """Return the media of a shard if those of all its rows are cached, else None."""
        with self._lock:
            cached = self._shards.get((ref, shard), [])
            return [*cached] if cached and len(cached) == rows else None

    def _drop(self, key: tuple[ArtifactRef, str]) -> None:
        self._size -= sum(each.nbytes for each in self._shards.pop(key))
