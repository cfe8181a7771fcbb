"""A store with one Parquet file per shard and one row group per prompt group.

Arrays and media are binary columns without compression or dictionary, so every value lies in the file unchanged. The
writer finds the offset of each value, compares it byte for byte, and notes it in the file's metadata. A reader maps or
range-reads values there without decoding, and any Parquet reader reads them as columns.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from flowmill.configs.errors import CorruptError, StoreError
from flowmill.storage.artifacts.shard_files import Files
from flowmill.storage.backends.base import FileEntry
from flowmill.storage.backends.mapped_file import MappedFile
from flowmill.storage.trajectories.arrays import array_entry
from flowmill.storage.trajectories.arrow_files import arrow_file
from flowmill.storage.trajectories.base import ARRAYS, Sample, TrajectoryShard
from flowmill.storage.trajectories.media import DEFAULT_MEDIA, MediaFormat
from flowmill.storage.trajectories.schema import SAMPLES, column, read_table, versioned

FILE = "samples.parquet"
_OFFSETS = "flowmill.offsets"
_MEDIA = "media"
_LENGTH = 4
"""Bytes before a value of variable length."""
_PAGE_HEADER = 256
"""Bytes within which the first value of a column must begin."""
_PAGE = 1 << 30
"""Maximum payload bytes of a row group, so that each column has one page."""


class ParquetStore:
    """One ``samples.parquet`` per shard."""

    def writer(self, folder: Path, media: MediaFormat = DEFAULT_MEDIA) -> ParquetWriter:
        """Begin a shard."""
        return ParquetWriter(folder / FILE, media)

    def open(self, files: Files) -> TrajectoryShard:
        """Open a shard."""
        return TrajectoryShard(lambda: self._read(files), lambda: files.blob(FILE), f"{files.where}/{FILE}")

    def _read(self, files: Files) -> pa.Table:
        """Return the table, with the offsets that the file's metadata hold."""
        table = read_table(files, FILE, SAMPLES)
        metadata = pq.read_metadata(arrow_file(files.blob(FILE))).metadata or {}
        places = json.loads(metadata.get(_OFFSETS.encode(), b"null"))
        if places is None or any(len(offsets) != table.num_rows for offsets in places.values()):
            raise CorruptError(f"{files.where}/{FILE} does not say where its {table.num_rows} payloads lie.")
        arrays = [
            [{**entry, "offset": places[entry["name"]][row]} for entry in entries]
            for row, entries in enumerate(table.column("arrays").to_pylist())
        ]
        for name, values in (("arrays", arrays), ("media_offset", places[_MEDIA])):
            field = SAMPLES.field(name)
            table = table.set_column(SAMPLES.get_field_index(name), field, pa.array(values, field.type))
        return table


class ParquetWriter:
    """Encodes media as samples arrive; the file is written at the end, as column widths depend on all samples."""

    def __init__(self, path: Path, media: MediaFormat) -> None:
        """Begin with no samples."""
        self._path = path
        self._media = media
        self._rows: list[_Row] = []

    def add(self, samples: Sequence[Sample]) -> None:
        """Encode media."""
        self._rows += [_Row.of(sample, self._media) for sample in samples]

    def end(self) -> Sequence[FileEntry]:
        """Write the row groups, then the offsets of all payloads."""
        samples = [row.sample for row in self._rows]
        combinations = {tuple(sample.arrays()) for sample in samples}
        if len(combinations) > 1:
            raise StoreError(
                f"The samples of one shard hold different arrays: {sorted(combinations)}. Use store 'webdataset'."
            )
        payloads = [*(combinations.pop() if combinations else ()), _MEDIA]
        schema = _schema(samples, payloads)
        places: dict[str, list[int]] = {name: [] for name in payloads}
        with self._path.open("wb") as file, _writer(file, schema, payloads) as writer:
            for group in _groups(self._rows):
                start = file.tell()
                rows = [row.columns() for row in group]
                writer.write_table(pa.Table.from_pylist(rows, schema=schema), row_group_size=len(rows))
                file.flush()
                _locate(self._path, start, rows, {name: schema.field(name).type for name in payloads}, places)
            writer.add_key_value_metadata({_OFFSETS: json.dumps(places, separators=(",", ":"))})
        return []


@dataclass(frozen=True, slots=True)
class _Row:
    """A sample with encoded media."""

    sample: Sample
    form: str
    encoded: bytes

    @classmethod
    def of(cls, sample: Sample, media: MediaFormat) -> _Row:
        """Encode the media of a sample, if it has any."""
        if sample.media is None:
            return cls(sample, "", b"")
        encoded = media.encode(sample.media, sample.sound)
        return cls(replace(sample, media=None, sound=None), media.choose(sample.media), encoded)

    def columns(self) -> dict[str, Any]:
        """Return all columns of the file."""
        arrays = self.sample.arrays()
        return {
            **{name: array.tobytes() for name, array in arrays.items()},
            _MEDIA: self.encoded,
            **self.sample.columns(),
            "arrays": [array_entry(name, array, -1) for name, array in arrays.items()],
            "media_format": self.form,
            "media_offset": -1,
            "media_size": len(self.encoded),
        }


def _schema(samples: Sequence[Sample], payloads: Sequence[str]) -> pa.Schema:
    """Return the payload columns, with fixed width if all values have the same size, then those of ``SAMPLES``."""
    fields = []
    for name in payloads:
        widths = set() if name == _MEDIA else {sample.arrays()[name].nbytes for sample in samples}
        kind = pa.binary(widths.pop()) if len(widths) == 1 else pa.binary()
        fields.append(column(name, kind, ARRAYS.get(name, "The image or clip, encoded; empty without one.")))
    return versioned(pa.schema([*fields, *SAMPLES]))


def _writer(file: Any, schema: pa.Schema, payloads: Sequence[str]) -> pq.ParquetWriter:
    tables = [name for name in schema.names if name not in payloads]
    return pq.ParquetWriter(
        file,
        schema,
        version="2.6",
        data_page_version="1.0",
        data_page_size=2 * _PAGE - 1,
        compression={name: "NONE" if name in payloads else "SNAPPY" for name in schema.names},
        use_dictionary=[name for name in tables if pa.types.is_string(schema.field(name).type)],
        write_statistics=[name for name in tables if not pa.types.is_nested(schema.field(name).type)],
    )


def _groups(rows: Sequence[_Row]) -> list[list[_Row]]:
    """Return groups of consecutive rows of one prompt, split where a column would need a second page."""
    groups: list[list[_Row]] = []
    for _, members in itertools.groupby(rows, key=lambda row: row.sample.prompt_id):
        size = 0
        groups.append([])
        for row in members:
            largest = max([array.nbytes for array in row.sample.arrays().values()] + [len(row.encoded)])
            if groups[-1] and size + largest > _PAGE:
                groups.append([])
                size = 0
            groups[-1].append(row)
            size += largest
    return groups


def _locate(
    path: Path,
    start: int,
    rows: Sequence[dict[str, Any]],
    columns: dict[str, pa.DataType],
    places: dict[str, list[int]],
) -> None:
    """Append the offsets of payloads of a row group to ``places``, in file order, and compare each with its source."""
    blob = MappedFile(path)
    position = start
    for name, kind in columns.items():
        prefix = 0 if pa.types.is_fixed_size_binary(kind) else _LENGTH
        values = [row[name] for row in rows]
        lengths = [prefix + len(value) for value in values]
        length = len(values[0]).to_bytes(prefix, "little") if prefix else b""
        first = length + values[0][:_PAGE_HEADER]
        # A short value may also occur in page headers, so all matches in the window are tried.
        window = bytes(blob.read(position, min(2 * _PAGE_HEADER + len(first), blob.size - position)))
        header = window.find(first)
        while header >= 0:
            offsets = list(itertools.accumulate(lengths[:-1], initial=position + header + prefix))
            if _lies(blob, offsets, values):
                break
            header = window.find(first, header + 1)
        else:
            raise StoreError(f"pyarrow {pa.__version__} lays Parquet files out in another way. Use store 'webdataset'.")
        places[name] += offsets
        position = offsets[-1] + len(values[-1])


def _lies(blob: MappedFile, offsets: Sequence[int], values: Sequence[bytes]) -> bool:
    """Return whether each value lies at its offset."""
    return offsets[-1] + len(values[-1]) <= blob.size and all(
        bytes(blob.read(offset, len(value))) == value for offset, value in zip(offsets, values, strict=True)
    )
