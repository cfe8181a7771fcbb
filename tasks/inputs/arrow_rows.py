"""Reads rows of Parquet files, and of folders that ``save_to_disk`` of datasets wrote, with Arrow.

Rows are read one after the other, so memory does not grow with their number.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from configs.data import DataSection
from configs.errors import PromptError, first_line
from configs.schema import PromptsSection
from tasks.inputs.prompt_rows import Rows
from tasks.inputs.saved_datasets import SAVE_AGAIN, saved_files

#: Bytes and rows of a table that are in memory at once, about.
_BATCH_BYTES, _BATCH_ROWS = 1 << 24, 1 << 12


def parquet_rows(path: str, start: int = 0) -> Rows:
    """Yield the rows of a Parquet file, from the one after the first ``start``.

    Raises:
        PromptError: the file is not a Parquet file, or a column cannot be read.
    """
    try:
        with parquet.ParquetFile(path, buffer_size=1 << 20) as file:
            for group in range(file.num_row_groups):
                about = file.metadata.row_group(group)
                if start >= about.num_rows:
                    start -= about.num_rows
                    continue
                rows = _batch_rows(about.total_byte_size, about.num_rows)
                yield from _group_rows(file.iter_batches(rows, [group]), file.metadata, group, path, start)
                start = 0
    except (pa.ArrowException, OSError) as error:
        raise PromptError(f"'{path}' is not a Parquet file: {first_line(error)}") from None


def _group_rows(batches: Iterable[pa.RecordBatch], metadata: Any, group: int, path: str, start: int) -> Rows:
    number = sum(metadata.row_group(each).num_rows for each in range(group))
    for batch in batches:
        if start < batch.num_rows:
            yield from _table_rows(pa.table(batch.slice(start)), path, number + start)
        number, start = number + batch.num_rows, max(0, start - batch.num_rows)


def _batch_rows(size: int, rows: int) -> int:
    return max(1, min(_BATCH_ROWS, _BATCH_BYTES * rows // max(size, 1)))


def saved_rows(path: str, section: PromptsSection | DataSection, where: str, start: int = 0) -> Rows:
    """Yield the rows of a folder that ``save_to_disk`` of datasets wrote, from the one after the first ``start``.

    Raises:
        PromptError: the folder cannot be read, or has no such split.
    """
    table = _read_table(saved_files(Path(path), section.split, where))
    size = _batch_rows(table.nbytes, table.num_rows)
    for first in range(start, table.num_rows, size):
        yield from _table_rows(table.slice(first, size), path, first)


def _table_rows(table: pa.Table, path: str, before: int) -> Rows:
    values: dict[str, list[Any]] = {}
    for name, cells in zip(table.column_names, table.columns, strict=True):
        try:
            cells.validate(full=True)
            values[name] = cells.to_pylist()
        except (pa.ArrowException, ValueError, OverflowError) as error:
            raise PromptError(f"'{path}', column '{name}' cannot be read: {first_line(error)}") from None
    for number in range(table.num_rows):
        yield before + number + 1, {name: cells[number] for name, cells in values.items()}


def _read_table(files: list[Path]) -> pa.Table:
    """Return the rows of Arrow streams with equal columns as one table."""
    tables = []
    for file in files:
        try:
            with pa.memory_map(str(file)) as opened, pa.ipc.open_stream(opened) as stream:
                tables.append(stream.read_all())
            found = pa.concat_tables(tables)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise PromptError(
                f"'{file}' cannot be read as an Arrow stream: {first_line(error)}. {SAVE_AGAIN}"
            ) from None
    return found if tables else pa.table({})
