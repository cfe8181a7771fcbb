"""Bounds on memory of tables: cells as Python objects, and parts of files that Arrow decodes as a whole.

A small file may hold large cells: dictionaries, runs and compressed zeros take next to nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import types

from flowmill.tasks.inputs.rows.bounds import MOST_BYTES, MOST_TEXT, too_many_bytes

#: Most rows that are decoded at once, and bytes of those that are Python objects at once, roughly.
BATCH_ROWS, _BATCH_BYTES = 1 << 12, 1 << 24
#: Bytes of a Python object besides its content, roughly.
_OBJECT = 32
#: A column of a row group takes so many bytes of memory at most, or not so many times more than in the file.
_LARGE, _RATIO = 1 << 28, 1000
#: Bytes of a value of Parquet by its physical type; of a text those of its place in a dictionary.
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8, "BYTE_ARRAY": 4}
#: Numbers of Arrow's format: kinds of messages, and fields of their flatbuffers.
_DICTIONARY, _BATCH = 2, 3
_KIND, _CONTENT, _DATA, _COMPRESSION = 1, 2, 1, 3


def bounded_parts(batch: pa.RecordBatch) -> Iterator[tuple[pa.RecordBatch, str]]:
    """Yield a batch in parts that take little memory as Python objects, each with '', or with the complaint on its
    only row, which is too large.

    Raises:
        ValueError: a column has a type whose cells have no bound.
    """
    starts = np.arange(batch.num_rows)
    sizes, complaints = np.zeros_like(starts), dict[int, str]()
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        row_bytes = _bytes_between(column, starts, starts + 1)
        most = MOST_BYTES if holds_files(column.type) else MOST_TEXT
        complaints |= {
            int(row): f"the column '{name}' {too_many_bytes(int(row_bytes[row]), most)}"
            for row in np.flatnonzero(row_bytes > most)
        }
        sizes += row_bytes
    ends, start = np.cumsum(sizes), 0
    while start < batch.num_rows:
        before = ends[start] - sizes[start]
        stop = max(start + 1, int(np.searchsorted(ends, before + _BATCH_BYTES, "right")))
        stop = start + 1 if start in complaints else min([stop, *(row for row in complaints if row > start)])
        yield batch.slice(start, stop - start), complaints.get(start, "")
        start = stop


def _bytes_between(cells: pa.Array, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return the bytes that the cells from each start to its end take as Python objects, roughly."""
    kind, counts = cells.type, ends - starts
    if isinstance(cells, pa.ExtensionArray):
        return _bytes_between(cells.storage, starts, ends)
    if types.is_dictionary(kind):
        inner = _of_dictionary(cells, starts, ends)
    elif types.is_struct(kind):
        inner = sum(_bytes_between(cells.field(number), starts, ends) for number in range(kind.num_fields))
    elif types.is_fixed_size_list(kind):
        first, width = cells.offset, kind.list_size
        inner = _bytes_between(cells.values, (first + starts) * width, (first + ends) * width)
    elif types.is_list(kind) or types.is_large_list(kind) or types.is_map(kind):
        places = np.asarray(cells.offsets).astype(np.int64)
        inner = _bytes_between(cells.values, places[starts], places[ends])
    elif any(each(kind) for each in (types.is_string, types.is_binary, types.is_large_string, types.is_large_binary)):
        places = _offsets(cells)
        inner = places[ends] - places[starts]
    else:
        inner = counts * _width(kind)
    return np.asarray(counts * _OBJECT + inner)


def _of_dictionary(cells: pa.DictionaryArray, starts: np.ndarray, ends: np.ndarray) -> Any:
    count = len(cells.dictionary)
    if not count:
        return 0
    places = np.arange(count)
    of_each = _bytes_between(cells.dictionary, places, places + 1)[np.asarray(cells.indices.fill_null(0))]
    summed = np.concatenate([[0], np.cumsum(of_each)])
    return summed[ends] - summed[starts]


def _offsets(cells: pa.Array) -> np.ndarray:
    buffer, wide = cells.buffers()[1], types.is_large_string(cells.type) or types.is_large_binary(cells.type)
    if not buffer:
        return np.zeros(len(cells) + 1, np.int64)
    offsets = np.frombuffer(buffer, np.int64 if wide else np.int32)
    return offsets[cells.offset : cells.offset + len(cells) + 1].astype(np.int64)


def _width(kind: pa.DataType) -> int:
    try:
        return 0 if types.is_null(kind) else kind.bit_width // 8
    except ValueError:
        raise ValueError(f"has the type {kind}, which is not read") from None


def holds_files(kind: pa.DataType) -> bool:
    """Return whether cells of a type hold bytes."""
    if isinstance(kind, pa.BaseExtensionType):
        return holds_files(kind.storage_type)
    if types.is_dictionary(kind):
        return holds_files(kind.value_type)
    inner = (kind.field(number).type for number in range(kind.num_fields))
    return types.is_binary(kind) or types.is_large_binary(kind) or any(map(holds_files, inner))


def rows_at_once(metadata: Any, group: int, size: int) -> int:
    """Return the number of rows of a row group that are decoded at once.

    Args:
        metadata: of a Parquet file, of which texts are read as dictionaries.
        group: the row group.
        size: of the file.

    Raises:
        ValueError: a column takes much more memory than space in the file.
    """
    row_group, decoded = metadata.row_group(group), 1
    for number in range(row_group.num_columns):
        column = row_group.column(number)
        width = _WIDTHS.get(column.physical_type) or metadata.schema.column(number).length
        bytes_of_column = max(column.total_uncompressed_size, column.num_values * width)
        packed = min(column.total_compressed_size, size)
        if bytes_of_column > max(_LARGE, _RATIO * packed):
            raise ValueError(
                f"row group {group + 1}: the column '{column.path_in_schema}' takes {bytes_of_column:,} bytes "
                f"of memory, but {packed:,} in the file. Write the table again without it, or in smaller row groups"
            )
        # A text may repeat the beginning of the text before, so its size is unknown.
        decoded += bytes_of_column if "DELTA_BYTE_ARRAY" not in column.encodings else row_group.num_rows * _BATCH_BYTES
    return int(max(1, min(BATCH_ROWS, _BATCH_BYTES * row_group.num_rows // decoded)))


def texts_with_dictionary(metadata: Any) -> list[str]:
    """Return the columns of a Parquet file that are read as dictionaries, so that no text is repeated in memory."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    columns = (group.column(number) for group in groups for number in range(group.num_columns))
    names = {each.path_in_schema for each in columns if each.physical_type == "BYTE_ARRAY" and each.has_dictionary_page}
    return sorted(names)


def is_compressed(message: Any) -> bool:
    """Return whether the content of a message of an Arrow stream is compressed. Raises struct.error or ValueError if
    the message is damaged."""
    data = memoryview(message.metadata)
    (root,) = struct.unpack_from("<I", data)
    place, kind = _field(data, root, _KIND), 0
    if place:
        kind = data[place]
    table = _table(data, root, _CONTENT)
    if kind == _DICTIONARY and table:
        table = _table(data, table, _DATA)
    return kind in (_DICTIONARY, _BATCH) and bool(table and _field(data, table, _COMPRESSION))


def _field(data: memoryview, table: int, number: int) -> int:
    """Return the place of a field of a flatbuffer's table; 0 if it has none."""
    fields = table - struct.unpack_from("<i", data, table)[0]
    (size,) = struct.unpack_from("<H", data, fields)
    if 6 + 2 * number > size:
        return 0
    (offset,) = struct.unpack_from("<H", data, fields + 4 + 2 * number)
    return table + offset if offset else 0


def _table(data: memoryview, table: int, number: int) -> int:
    place = _field(data, table, number)
    return place + struct.unpack_from("<I", data, place)[0] if place else 0
