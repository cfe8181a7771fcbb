"""Reads rows of Parquet files, and of Arrow streams as ``save_to_disk`` of datasets writes them.

Rows are read one after the other, so memory does not grow with their number.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from flowmill.configs.errors import DataError, first_line
from flowmill.storage.backends.checksums import hash_data
from flowmill.tasks.inputs.rows.arrow_bounds import (
    BATCH_ROWS,
    bounded_parts,
    holds_files,
    is_compressed,
    rows_at_once,
    texts_with_dictionary,
)
from flowmill.tasks.inputs.rows.folder import SAVE_AGAIN
from flowmill.tasks.inputs.rows.lines import File
from flowmill.tasks.inputs.rows.row import Media, Rows


def parquet_rows(file: File, start: int = 0) -> Rows:
    """Yield the rows of a Parquet file, from the one after the first ``start``; an error for each that is too large,
    and for the rest of a row group that is damaged."""
    try:
        metadata, size, number = parquet.read_metadata(file.path), Path(file.path).stat().st_size, 0
        with parquet.ParquetFile(file.path, metadata=metadata) as opened:
            schema = opened.schema_arrow
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"'{file.name}' is not a Parquet file: {first_line(error)}") from None
    # Columns of JSON would be no dictionaries.
    options = {"read_dictionary": texts_with_dictionary(metadata), "arrow_extensions_enabled": False}
    with parquet.ParquetFile(file.path, metadata=metadata, buffer_size=1 << 20, **options) as opened:
        for group in range(metadata.num_row_groups):
            last, done = number + metadata.row_group(group).num_rows, max(number, start)
            try:
                if start < last:
                    batches = opened.iter_batches(rows_at_once(metadata, group, size), [group])
                    for done, row in _plain_rows(_rows_of(batches, file.name, number, start), schema, file.name):
                        yield done, row
            except (pa.ArrowException, OSError, ValueError) as error:
                # Arrow's errors are ValueErrors too.
                place = f"{file.name}, rows {done + 1:,} to {last:,}"
                yield done + 1, DataError(f"{place} cannot be read: {first_line(error)}. Write the file again.")
            number = last


def arrow_rows(file: File, start: int = 0) -> Rows:
    """Yield the rows of an Arrow stream, from the one after the first ``start``; an error for each that is too
    large."""
    number = 0
    for batch in _read_table(file).to_batches(max_chunksize=BATCH_ROWS):
        yield from _plain_rows(_rows_of([batch], file.name, number, start), batch.schema, file.name)
        number += batch.num_rows


def _rows_of(batches: Iterable[pa.RecordBatch], path: str, number: int, start: int) -> Rows:
    """Yield the rows of batches, of which the first has ``number`` rows before it."""
    for batch in batches:
        passed = min(max(0, start - number), batch.num_rows)
        number, rest = number + passed, batch.slice(passed)
        for name, cells in zip(rest.schema.names, rest.columns, strict=True):
            try:
                cells.validate(full=True)
            except (pa.ArrowException, ValueError) as error:
                raise DataError(f"'{path}', column '{name}' cannot be read: {first_line(error)}") from None
        for part, complaint in bounded_parts(rest):
            if complaint:
                yield number + 1, DataError(f"{path}, row {number + 1}: {complaint}. Remove the column, or the row.")
            else:
                yield from enumerate(_part_rows(part, path, number), number + 1)
            number += part.num_rows


def _part_rows(part: pa.RecordBatch, path: str, number: int) -> Iterator[dict[str, Any]]:
    values: dict[str, list[Any]] = {}
    for name, cells in zip(part.schema.names, part.columns, strict=True):
        try:
            plain = cells.dictionary_decode() if pa.types.is_dictionary(cells.type) else cells
            values[name] = plain.to_pylist()
        except (pa.ArrowException, ValueError, OverflowError) as error:
            raise DataError(f"'{path}', column '{name}' cannot be read: {first_line(error)}") from None
        if holds_files(cells.type):
            places = enumerate(values[name], number + 1)
            values[name] = [_with_media(value, row, (name,)) for row, value in places]
    return (dict(zip(values, cells, strict=True)) for cells in zip(*values.values(), strict=True))


def _with_media(value: Any, row: int, column: tuple[str | int, ...]) -> Any:
    """Return a cell with the files in it as such, also those that datasets has as bytes and path."""
    if isinstance(value, bytes):
        return Media(str(column[0]), hash_data(value), row, column=column, data=value)
    if isinstance(value, list):
        return [_with_media(each, row, (*column, place)) for place, each in enumerate(value)]
    if isinstance(value, Mapping) and value.keys() == {"bytes", "path"}:
        return value["path"] if value["bytes"] is None else _with_media(value["bytes"], row, column)
    if isinstance(value, Mapping):
        return {name: _with_media(each, row, (*column, name)) for name, each in value.items()}
    return value


def _plain_rows(rows: Rows, schema: pa.Schema, path: str) -> Rows:
    """Yield rows with decoded values of the columns that datasets keeps as JSON, as they have different types."""
    kinds = {column.name: column.type for column in schema if "arrow.json" in str(column.type)}
    for number, row in rows:
        if isinstance(row, DataError):
            yield number, row
            continue
        plain = dict(row)
        for name, kind in kinds.items():
            try:
                plain[name] = _decoded(plain[name], kind)
            except (ValueError, RecursionError) as error:
                complaint = f"{path}, row {number}: the column '{name}' cannot be read: {first_line(error)}"
                yield number, DataError(f"{complaint}. Mend the row.")
                break
        else:
            yield number, plain


def _decoded(value: Any, kind: pa.DataType) -> Any:
    if value is None:
        return None
    if getattr(kind, "extension_name", None) == "arrow.json":
        return json.loads(value)
    if isinstance(value, list):
        return [_decoded(each, kind.value_type) for each in value]
    if pa.types.is_struct(kind):
        return {field.name: _decoded(value[field.name], field.type) for field in kind}
    return value


def _read_table(file: File) -> pa.Table:
    """Return the rows of an Arrow stream, mapped into memory."""
    try:
        with pa.memory_map(file.path) as opened:
            for message in pa.ipc.MessageReader.open_stream(opened):
                if is_compressed(message):
                    raise ValueError("it is compressed, so its size in memory is not known")
            opened.seek(0)
            with pa.ipc.open_stream(opened) as stream:
                table = stream.read_all()
        if table.num_rows > 8 * Path(file.path).stat().st_size:
            raise ValueError(f"it claims {table.num_rows:,} rows")
    except (pa.ArrowException, OSError, ValueError, struct.error) as error:
        raise DataError(f"'{file.name}' cannot be read as an Arrow stream: {first_line(error)}. {SAVE_AGAIN}") from None
    return table
