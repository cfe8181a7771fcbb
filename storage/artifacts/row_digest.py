"""A digest of rows that is independent of shards and order: the sum of the hashes of all rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import xxhash

if TYPE_CHECKING:
    import numpy as np

_SPACE = 1 << 128


class Contents:
    """The sum of the hashes of the rows added so far."""

    def __init__(self) -> None:
        self._sum = 0

    def add(self, plain: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        """Add a row of JSON values and arrays, each by name."""
        row = xxhash.xxh3_128(json.dumps(plain, sort_keys=True, default=_number).encode())
        for name, array in sorted(arrays.items()):
            row.update(_description(name, array.dtype.str, array.shape))
            row.update(array.tobytes())
        self._sum = (self._sum + row.intdigest()) % _SPACE

    def add_table(self, columns: Mapping[str, Sequence[Any]]) -> None:
        """Add the rows of a table of JSON values, by column."""
        for values in zip(*columns.values(), strict=True):
            self.add(dict(zip(columns, values, strict=True)), {})

    def __str__(self) -> str:
        return f"{self._sum:032x}"


def joined(parts: Sequence[str]) -> str:
    """Return the digest of the rows of several shards; empty if one shard has none."""
    if not parts or not all(parts):
        return ""
    return f"{sum(int(part, 16) for part in parts) % _SPACE:032x}"


@lru_cache(4096)
def _description(name: str, dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return name, dtype and shape of an array as bytes, cached, as samples share few of them."""
    return json.dumps([name, dtype, shape]).encode()


def _number(value: Any) -> Any:
    """Return a NumPy scalar as a Python number."""
    return value.item()
