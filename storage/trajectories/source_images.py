"""The start images of prompts: unchanged files, each stored once by key."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from flowmill.configs.errors import CorruptError, NotCommittedError
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.layout import ArtifactRef
from flowmill.storage.trajectories.arrow_files import arrow_file
from flowmill.storage.trajectories.schema import REFERENCES, versioned

FILE = "references.parquet"
#: Images per row group, which is the unit of writing and reading.
_TOGETHER = 16


def write_references(folder: Path, keys: Sequence[str], read: Callable[[str], bytes]) -> None:
    """Write the image files of a prompt table; without images no file is written.

    Args:
        folder: folder of the shard.
        keys: key of each image.
        read: returns the file content of a key.
    """
    if not keys:
        return
    schema = versioned(REFERENCES)
    # Images are already compressed.
    with pq.ParquetWriter(folder / FILE, schema, version="2.6", compression="none", use_dictionary=False) as writer:
        for start in range(0, len(keys), _TOGETHER):
            some = keys[start : start + _TOGETHER]
            columns = {"image": list(some), "file": list(map(read, some))}
            writer.write_table(pa.table(columns, schema=schema), row_group_size=_TOGETHER)


class ReferenceFiles:
    """The image files of one prompts artifact, read on demand."""

    def __init__(self, store: ArtifactStore, ref: ArtifactRef) -> None:
        self._store, self._ref = store, ref
        self.where = str(ref)
        """Its name in messages."""

    def read(self, keys: Iterable[str]) -> dict[str, bytes]:
        """Return the files of images by key."""
        requested: dict[int, dict[str, int]] = {}
        for key in keys:
            if key not in self._places:
                raise NotCommittedError(f"{self._ref} holds no image {key}, which none of its prompts starts from.")
            requested.setdefault(self._places[key] // _TOGETHER, {})[key] = self._places[key] % _TOGETHER
        files: dict[str, bytes] = {}
        for group, places in requested.items():
            cells = self._open().read_row_group(group, columns=["file"]).column("file")
            files |= {key: cells[place].as_py() for key, place in places.items()}
        return files

    @property
    def empty(self) -> bool:
        """Whether there are no images: prompts have none, or were written by a version that did not store them."""
        return not self._places

    @cached_property
    def _places(self) -> dict[str, int]:
        (record,) = self._store.shards(self._ref)
        if FILE not in [entry.name for entry in record.files]:
            return {}
        try:
            file = self._open()
            keys = file.read(columns=["image"]).column("image").to_pylist()
            sizes = [file.metadata.row_group(number).num_rows for number in range(file.metadata.num_row_groups)]
            if not file.schema_arrow.equals(REFERENCES) or any(size != _TOGETHER for size in sizes[:-1]):
                raise ValueError("it is no table of images")
        except (OSError, KeyError, ValueError, pa.ArrowException) as error:
            raise CorruptError(f"{self._ref}: {FILE} cannot be read: {error}") from None
        return {key: place for place, key in enumerate(keys)}

    def _open(self) -> pq.ParquetFile:
        """Return a new reader of the table, as readers are not shared between threads."""
        (record,) = self._store.shards(self._ref)
        return pq.ParquetFile(arrow_file(self._store.files(self._ref, record).blob(FILE)))
