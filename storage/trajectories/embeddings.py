"""The embedding cache: each distinct prompt is encoded only once per encoder.

``embeddings/<encoder>/`` grows by shards. Each holds one ``.npy`` file per tensor, and ``rows.json`` with the key and
the content hash of each row. There is no manifest; readers see the committed shards. A key is a hash of the prompt
text. Rows are written batch by batch and read in place, so memory does not grow with the number of prompts.
"""

from __future__ import annotations

import json
import math
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
import xxhash

from flowmill.configs.errors import CorruptError, NotCommittedError
from flowmill.configs.fingerprint import fingerprint, hash_text
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.artifacts.records import ShardRecord
from flowmill.storage.backends.base import Blob
from flowmill.storage.layout import ArtifactRef
from flowmill.storage.trajectories.arrays import stored_dtype

ROWS = "rows.json"
#: Limits on open files, and on the bytes of rows in memory.
_MAX_OPEN = 16
_MAX_BYTES = 256_000_000


@dataclass(frozen=True, slots=True)
class Rows:
    """Named tensors with one row per prompt."""

    arrays: Mapping[str, np.ndarray]
    """(N, ...) by name."""
    dtypes: Mapping[str, str] = field(default_factory=dict)
    """The dtype of an array where NumPy lacks it: ``bfloat16``, stored as uint16."""


def embedding_key(text: str) -> str:
    """Return the cache key of a prompt text."""
    return hash_text(text)


class EmbeddingWriter:
    """Writes the files of one shard batch by batch; row i of the shard belongs to the i-th text."""

    def __init__(self, folder: Path, texts: Sequence[str]) -> None:
        """Begin the files of a shard.

        Args:
            folder: an empty folder.
            texts: the texts of all rows that will be added.
        """
        self._folder = folder
        self._keys = [embedding_key(text) for text in texts]
        self._hashes: list[str] = []
        self._tensors: dict[str, dict[str, Any]] = {}
        self._files: dict[str, IO[bytes]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> EmbeddingWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()
        if kind is None:
            index = {"tensors": self._tensors, "keys": self._keys, "hashes": self._hashes}
            (self._folder / ROWS).write_text(json.dumps(index, sort_keys=True))

    def add(self, rows: Rows) -> None:
        """Append the rows of the next texts."""
        arrays = {name: np.ascontiguousarray(array) for name, array in sorted(rows.arrays.items())}
        for name, array in arrays.items():
            if name not in self._files:
                self._begin(name, array, rows.dtypes.get(name, str(array.dtype)))
            self._files[name].write(array.data.cast("B"))
        for row in range(len(next(iter(arrays.values())))):
            self._hashes.append(self._hash({name: array[row] for name, array in arrays.items()}))

    def _begin(self, name: str, array: np.ndarray, dtype: str) -> None:
        file = self._stack.enter_context((self._folder / f"{name}.npy").open("wb"))
        header = np.lib.format.header_data_from_array_1_0(array)
        np.lib.format.write_array_header_1_0(file, {**header, "shape": (len(self._keys), *array.shape[1:])})
        entry = {"dtype": dtype, "stored": array.dtype.str, "shape": list(array.shape[1:]), "offset": file.tell()}
        self._tensors[name], self._files[name] = entry, file

    def _hash(self, row: Mapping[str, np.ndarray]) -> str:
        digest = xxhash.xxh3_128()
        for name, array in row.items():
            digest.update(json.dumps([name, self._tensors[name]["dtype"], list(array.shape)]).encode())
            digest.update(array.data)
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class _Shard:
    """Index of a committed shard."""

    record: ShardRecord
    tensors: Mapping[str, Mapping[str, Any]]
    hashes: Sequence[str]


class EmbeddingCache:
    """Rows of named tensors by prompt text."""

    def __init__(self, store: ArtifactStore, ref: ArtifactRef) -> None:
        self.store = store
        self.ref = ref
        self._where: dict[str, tuple[int, int]] = {}
        self._shards: list[_Shard] = []
        self._seen: set[str] = set()
        self._open: OrderedDict[tuple[int, str], Blob] = OrderedDict()
        self._rows: OrderedDict[str, dict[str, np.ndarray]] = OrderedDict()
        self._rows_bytes = 0
        self._lock = threading.RLock()

    def missing(self, texts: Sequence[str]) -> list[str]:
        """Return the distinct texts that are not cached, in order of first appearance."""
        self._refresh()
        return [text for text in dict.fromkeys(texts) if embedding_key(text) not in self._where]

    def load(self, texts: Sequence[str]) -> Rows:
        """Return (len(texts), ...) arrays in the order of the texts."""
        keys = self._keys(texts)
        with self._lock:
            rows = [self._row(key) for key in keys]
            tensors = self._shards[self._where[keys[0]][0]].tensors
        if any(row.keys() != tensors.keys() for row in rows):
            raise CorruptError(f"{self.ref}: its shards hold other tensors than {', '.join(tensors)}.")
        arrays = {name: np.stack([row[name] for row in rows]) for name in tensors}
        bits = {
            name: entry["dtype"] for name, entry in tensors.items() if str(np.dtype(entry["stored"])) != entry["dtype"]
        }
        return Rows(arrays, bits)

    def digest(self, texts: Sequence[str]) -> str:
        """Return one hash over the embeddings of these texts, independent of shards and without reading values."""
        ordered = sorted(set(texts))
        places = [self._where[key] for key in self._keys(ordered)]
        return fingerprint([self._shards[shard].hashes[row] for shard, row in places])

    def _keys(self, texts: Sequence[str]) -> list[str]:
        keys = [embedding_key(text) for text in texts]
        if any(key not in self._where for key in keys):
            absent = self.missing(texts)
            if absent:
                raise NotCommittedError(
                    f"{len(absent)} prompts have no embedding in {self.ref}, the first is {absent[0]!r}. "
                    "Run 'flowmill stage preprocess' first."
                )
        return keys

    def _row(self, key: str) -> dict[str, np.ndarray]:
        """Return the row of a key, from memory if it was used recently."""
        if key in self._rows:
            self._rows.move_to_end(key)
            return self._rows[key]
        number, row = self._where[key]
        tensors = {name: self._read(number, name, row) for name in self._shards[number].tensors}
        self._rows[key] = tensors
        self._rows_bytes += _size(tensors)
        while self._rows_bytes > _MAX_BYTES and len(self._rows) > 1:
            self._rows_bytes -= _size(self._rows.popitem(last=False)[1])
        return tensors

    def _read(self, number: int, name: str, row: int) -> np.ndarray:
        entry = self._shards[number].tensors[name]
        dtype = np.dtype(entry["stored"])
        size = dtype.itemsize * math.prod(entry["shape"])
        data = self._blob(number, name).read(entry["offset"] + row * size, size)
        return np.frombuffer(bytes(data), dtype).reshape(entry["shape"])

    def _blob(self, number: int, name: str) -> Blob:
        if (number, name) not in self._open:
            files = self.store.files(self.ref, self._shards[number].record)
            self._open[number, name] = files.blob(f"{name}.npy")
        self._open.move_to_end((number, name))
        while len(self._open) > _MAX_OPEN:
            self._open.popitem(last=False)
        return self._open[number, name]

    def _refresh(self) -> None:
        with self._lock:
            for name in self.store.committed(self.ref):
                record = None if name in self._seen else self.store.record(self.ref, name)
                if record is not None:
                    self._add(record)
                    self._seen.add(name)

    def _add(self, record: ShardRecord) -> None:
        path = self.store.files(self.ref, record).path(ROWS)
        try:
            index = json.loads(path.read_text())
            shard = _Shard(record, dict(sorted(index["tensors"].items())), index["hashes"])
            keys = list(index["keys"])
            _check(shard, len(keys))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CorruptError(f"{path} is no table of embedding rows: {error}") from None
        places = {key: (len(self._shards), row) for row, key in enumerate(keys)}
        # Runs that encode at once may commit rows of one text that differ by rounding. The last shard by name counts:
        # all processes read the same row, in any order in which they see the shards.
        for key in places.keys() & self._where.keys():
            if self._shards[self._where[key][0]].record.shard > record.shard:
                del places[key]
            elif key in self._rows:
                self._rows_bytes -= _size(self._rows.pop(key))
        self._where.update(places)
        self._shards.append(shard)


def _check(shard: _Shard, count: int) -> None:
    """Check that an index describes arrays, as the store may be untrusted; raise ValueError otherwise."""
    # A shard is empty if another run encoded all its rows in the meantime.
    if len(shard.hashes) != count or bool(shard.tensors) != bool(count):
        raise ValueError(f"{len(shard.hashes)} hashes and {len(shard.tensors)} tensors for {count} rows")
    for name, entry in shard.tensors.items():
        stored_dtype(entry["stored"], entry["shape"])
        plain = all(type(n) is int and n >= 0 for n in entry["shape"])
        if not plain or type(entry["offset"]) is not int or "/" in name:
            raise ValueError(f"'{name}' is {entry}")


def _size(row: Mapping[str, np.ndarray]) -> int:
    return sum(array.nbytes for array in row.values())
