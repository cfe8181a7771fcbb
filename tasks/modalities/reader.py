"""Reads the samples of many shards: all columns at once, payloads of a few shards at a time."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from flowmill.storage.trajectories.base import TrajectoryShard
from flowmill.storage.trajectories.tables import in_few_chunks
from flowmill.tasks.metrics.samples import about_sample

_COLUMNS = ("sample_id", "group_id", "epoch", "prompt_id", "steps", "states", "log_probs", "sigmas")


class RaggedArray:
    """A column of lists as two arrays."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        lists = column.combine_chunks()
        self._offsets: np.ndarray = lists.offsets.to_numpy()
        self._values: np.ndarray = lists.values.to_numpy(zero_copy_only=False)

    def __getitem__(self, row: int) -> np.ndarray:
        values: np.ndarray = self._values[self._offsets[row] : self._offsets[row + 1]]
        return values

    @property
    def sizes(self) -> np.ndarray:
        """(N,) length of each list."""
        return np.diff(self._offsets)

    @property
    def values(self) -> np.ndarray:
        """All values."""
        values: np.ndarray = self._values[self._offsets[0] : self._offsets[-1]]
        return values


class SampleReader:
    """The samples of many shards, numbered in order.

    Only the columns of tables that training needs stay. Payload files are opened on first use, and the least recently
    used ones are closed, so memory does not grow with the number of shards.
    """

    def __init__(self, shards: Sequence[TrajectoryShard], *, max_open: int = 64) -> None:
        """Bind to opened shards.

        Args:
            shards: in order.
            max_open: payload files that stay open.
        """
        self._shards = shards
        self._max_open = max_open
        self._open: OrderedDict[int, None] = OrderedDict()
        self._last = -1
        self._lock = threading.Lock()
        self._starts: list[int] = [0]
        table = in_few_chunks(self._noted(shard) for shard in shards)
        self.sample_ids: pa.ChunkedArray = table.column("sample_id")
        self.epochs: np.ndarray = table.column("epoch").to_numpy()
        groups, prompts = (
            table.column(name).combine_chunks().dictionary_encode() for name in ("group_id", "prompt_id")
        )
        self.groups: np.ndarray = groups.indices.to_numpy()
        """(N,) number of each sample's group."""
        self.group_ids: pa.Array = groups.dictionary
        """(G,) id of each group."""
        self.prompt_ids: list[str] = prompts.dictionary.to_pylist()
        self.prompt_rows: np.ndarray = prompts.indices.to_numpy()
        self.steps, self.states = RaggedArray(table.column("steps")), RaggedArray(table.column("states"))
        self.log_probs, self.sigmas = RaggedArray(table.column("log_probs")), RaggedArray(table.column("sigmas"))

    def _noted(self, shard: TrajectoryShard) -> pa.Table:
        """Return the columns of a shard, noting the rest of its table that training needs, which is dropped."""
        table = shard.table.select(_COLUMNS)
        self._starts.append(self._starts[-1] + table.num_rows)
        shard.index()
        shard.close()
        return table

    def __len__(self) -> int:
        return self._starts[-1]

    def array(self, name: str, sample: int) -> np.ndarray:
        """Return a stored array of a sample, read-only."""
        number = bisect_right(self._starts, sample) - 1
        if number != self._last:
            self._use(number)
        return self._shards[number].array(name, sample - self._starts[number])

    def id_and_metadata(self, sample: int) -> tuple[str, dict[str, Any]]:
        """Return id and metadata of a sample."""
        number = bisect_right(self._starts, sample) - 1
        self._use(number)
        return about_sample(self._shards[number], sample - self._starts[number])

    def shape(self, name: str, sample: int) -> tuple[int, ...]:
        """Return the shape of a stored array of a sample."""
        number = bisect_right(self._starts, sample) - 1
        return self._shards[number].shape(name, sample - self._starts[number])

    def _use(self, number: int) -> None:
        with self._lock:
            self._last = number
            self._open[number] = None
            self._open.move_to_end(number)
            while len(self._open) > self._max_open:
                oldest, _ = self._open.popitem(last=False)
                self._shards[oldest].close()
