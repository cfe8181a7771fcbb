"""Media that this process has just stored without loss: rewards get them as they are and need not decode them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable

import numpy as np

from storage.layout import ArtifactRef

#: Bytes that are kept at most; the oldest shards go first, and are decoded if they are asked for.
_KEPT = 128 << 20


class Recent:
    """Images or clips of the newest artifact of each kind, by shard; several threads may ask."""

    def __init__(self, kept: int = _KEPT) -> None:
        """Keep nothing yet, and never more than some bytes."""
        self._limit = kept
        self._shards: OrderedDict[tuple[ArtifactRef, str], list[np.ndarray]] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def begin(self, ref: ArtifactRef, shard: str, *, exact: bool) -> Callable[[Iterable[np.ndarray]], None]:
        """Return the cache of the (H, W, 3) images or (F, H, W, 3) clips, uint8, of a shard's next rows.

        Args:
            ref: the artifact; nothing is kept any more of others of its kind.
            shard: the shard, of which nothing of an attempt before is kept.
            exact: storage is lossless; otherwise nothing is kept.
        """
        key = (ref, shard)
        with self._lock:
            for known in [*self._shards]:
                if known == key or (known[0].kind == ref.kind and known[0] != ref):
                    self._drop(known)
            if exact:
                self._shards[key] = []

        def add(media: Iterable[np.ndarray]) -> None:
            with self._lock:
                if key not in self._shards:
                    # It is not exact, or some of it had to go.
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
        """Return the media of a shard, or None unless those of all its rows are kept."""
        with self._lock:
            found = self._shards.get((ref, shard), [])
            return [*found] if found and len(found) == rows else None

    def _drop(self, key: tuple[ArtifactRef, str]) -> None:
        self._size -= sum(each.nbytes for each in self._shards.pop(key))
