"""Short texts by key that ranks exchange in addition to tensors, on the store of their rendezvous."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

#: Timeout of one request for a text; requests are repeated without a limit.
_REQUEST = timedelta(seconds=30)


class KeyValueStore:
    """Texts by key. The heartbeat detects hanging ranks, so reads here have no timeout."""

    def __init__(self, store: Any = None, prefix: str = "flowmill") -> None:
        """Bind to the store of the process group, or to another."""
        self._store: Any = store or dist.distributed_c10d._get_default_store()
        self._prefix = prefix

    def below(self, part: str) -> KeyValueStore:
        """Return a store with a separate key prefix."""
        return KeyValueStore(self._store, f"{self._prefix}/{part}")

    def second_connection(self) -> KeyValueStore:
        """Return the same store on a separate connection, for another thread: waiting blocks a connection."""
        return KeyValueStore(self._store.clone(), self._prefix)

    def post(self, key: str, text: str) -> None:
        """Set a text."""
        self._store.set(f"{self._prefix}/{key}", text)

    def read(self, key: str) -> str:
        """Wait for a text and return it."""
        name = f"{self._prefix}/{key}"
        while True:
            try:
                self._store.wait([name], _REQUEST)
                return bytes(self._store.get(name)).decode()
            except dist.DistStoreError as error:
                if "imeout" not in str(error) and "imed out" not in str(error):
                    raise

    def find(self, key: str) -> str | None:
        """Return a text if it exists, else None."""
        name = f"{self._prefix}/{key}"
        return bytes(self._store.get(name)).decode() if self._store.check([name]) else None

    def take(self, key: str) -> int:
        """Return the number of earlier calls with this key by all ranks."""
        return int(self._store.add(f"{self._prefix}/{key}", 1)) - 1
