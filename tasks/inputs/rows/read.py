"""Reads the rows of a source, and the images and clips in them again."""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

from flowmill.configs.errors import DataError
from flowmill.tasks.inputs.rows.bounds import MOST_BYTES, MOST_TEXT
from flowmill.tasks.inputs.rows.files import row_files
from flowmill.tasks.inputs.rows.folder import CAPTIONS, LISTS, Folder
from flowmill.tasks.inputs.rows.lines import DAMAGED, File, array_rows, json_rows, separated_rows, text_rows, unpacked
from flowmill.tasks.inputs.rows.remote import copied, is_remote, remote_data, remote_range
from flowmill.tasks.inputs.rows.row import MEDIA, PACKED, REPEATED, Media, Names, RowLocation, Rows, decoded, ending_of
from flowmill.tasks.inputs.rows.tars import tar_rows

#: Rows of a table that are passed by instead of opening it again at a later one.
_NEAR = 1000
#: Columns of a row, or the reason why it cannot be read.
Row = Mapping[str, Any] | DataError
_LOCK = threading.Lock()
#: The last folders of images.
_beside = functools.lru_cache(maxsize=4)(Folder)


def source_rows(source: str, split: str, where: str, names: Names) -> Iterator[tuple[RowLocation, Row]]:
    """Yield location and columns of each row, or the reason why a row cannot be read.

    Args:
        source: see ``row_files``.
        split: the split to read, where there are several.
        where: the setting that names the source, for errors.
        names: columns of what the source holds without naming it.

    Raises:
        DataError: the source cannot be read at all.
    """
    try:
        before = 0
        for number, file in enumerate(row_files(source, split, where), 1):
            if file.lower().endswith(MEDIA):
                # Images have no order that people see, so their names are their places.
                yield RowLocation(where, file, number), _image(file, where, names)
                continue
            count = 0
            for count, row in _file_rows(file, names):
                place = RowLocation(where, file, count, before)
                yield place, _error(row, where) if isinstance(row, DataError) else row
            before += count
    except DataError as error:
        raise _error(error, where) from None


def _error(error: DataError, where: str) -> DataError:
    return DataError(f"{where}: {str(error).removeprefix(f'{where}: ')}")


def folder_of(place: RowLocation) -> str:
    """Return the folder that paths in a row are below."""
    return place.source.rpartition("/")[0] or "."


def read_again(file: str, start: int, size: int | None, column: tuple[str | int, ...]) -> bytes:
    """Return the content of a file, or of an image or clip in it, see ``Media``; raise OSError or DataError if it
    cannot be read."""
    if column:
        return _cell(file, start, column)
    if file.lower().endswith((*PACKED, ".tgz")):
        with _LOCK:
            opened = _unpacked(file, os.getpid())
            opened.seek(start)
            return opened.read(MOST_BYTES if size is None else size)
    if is_remote(file):
        folder, _, name = file.rpartition("/")
        data = remote_data(file) if size is None else remote_range(folder, name, start, start + size)
        if data is None:
            raise FileNotFoundError(f"'{file}' does not exist")
        return data
    with Path(file).open("rb") as plain:
        plain.seek(start)
        return plain.read(MOST_BYTES if size is None else size)


@functools.lru_cache(maxsize=4)
def _unpacked(file: str, process: int) -> IO[bytes]:
    """Return the content of a packed tar, which is read most quickly in order."""
    with _here(file) as path:
        return io.BufferedReader(cast(Any, unpacked(path, file)), 1 << 16)


def _image(file: str, where: str, names: Names) -> Row:
    folder, _, name = file.rpartition("/")
    beside, stem = _beside(folder), name.rpartition(".")[0]
    caption = next((each for ending in CAPTIONS if beside.has(each := f"{stem}{ending}")), None)
    named = REPEATED.fullmatch(folder.rpartition("/")[2]) if names.folders and caption is None else None
    if named is not None:
        return {names.prompt: named[2], names.sample: name}
    try:
        if caption is None:
            raise ValueError("it is missing")
        text = beside.data(caption, MOST_TEXT).decode("utf-8-sig").strip()
        if not text and not names.empty:
            raise ValueError("it is empty")
        return {names.prompt: text, names.sample: name}
    except (OSError, ValueError) as error:
        remedy = f"Write '{stem}.txt' next to it in UTF-8, or remove the image."
        return DataError(f"{where}: the text of '{file}' cannot be used: {error}. {remedy}")


def _file_rows(file: str, names: Names, start: int = 0) -> Rows:
    """Yield the rows of a file; of tables from the one after the first ``start``."""
    number, ending = start, ending_of(file)
    with _here(file) as path:
        try:
            rows = _reader(File(file, path), ending, names, start)
            for number, row in _of_list(rows, names) if file.rpartition("/")[2] in LISTS else rows:
                yield number, row
        except DAMAGED as error:
            text = f"{file} cannot be read after {number:,} lines or rows: {error}. Write it again."
            yield number + 1, DataError(text)


def _reader(file: File, ending: str, names: Names, start: int) -> Rows:
    if ending in (".parquet", ".arrow"):
        # Imported late: it takes its time.
        from flowmill.tasks.inputs.rows.tables import arrow_rows, parquet_rows

        return (parquet_rows if ending == ".parquet" else arrow_rows)(file, start)
    if ending == ".tar":
        return tar_rows(file, names)
    if ending == ".txt":
        return text_rows(file, names.prompt)
    return {".csv": separated_rows, ".tsv": separated_rows, ".json": array_rows}.get(ending, json_rows)(file)


def _of_list(rows: Rows, names: Names) -> Rows:
    """Yield the rows of a list of images, as datasets has them."""
    for number, row in rows:
        if isinstance(row, Mapping) and "file_name" in row:
            others = {name: value for name, value in row.items() if name != "file_name"}
            yield number, {**others, names.sample: row["file_name"]}
        else:
            yield number, row


def _here(file: str) -> contextlib.AbstractContextManager[str]:
    return copied(file) if is_remote(file) else contextlib.nullcontext(file)


class _Table:
    """Rows of a table that are read again, most quickly in order."""

    def __init__(self) -> None:
        self._file, self._rows = "", cast("Iterator[tuple[int, Row]]", iter(()))
        self._number, self._row = 0, cast(Row, {})

    def row(self, file: str, number: int) -> Row:
        if file != self._file or not self._number <= number <= self._number + _NEAR or not self._number:
            self._rows, self._file, self._number = iter(_file_rows(file, Names(), number - 1)), file, number - 1
        while self._number < number:
            self._number, self._row = next(self._rows)
        return self._row


@functools.lru_cache(maxsize=4)
def _table(folder: str, process: int) -> _Table:
    return _Table()


# Readers need the modules that an interpreter takes away at its end.
atexit.register(_table.cache_clear)


def _cell(file: str, number: int, column: tuple[str | int, ...]) -> bytes:
    try:
        with _LOCK:
            value: Any = _table(file.rpartition("/")[0], os.getpid()).row(file, number)
        for place in column:
            value = value[place]
        data = value.data if isinstance(value, Media) else decoded(value)
        if data is None:
            raise TypeError("no bytes")
    except (DataError, StopIteration, LookupError, TypeError):
        _table.cache_clear()
        raise DataError(f"'{file}' was changed since the rows were read. Give the same command again.") from None
    return data
