"""Reads rows of prompt files (``configs.schema.PROMPT_FILES``), ``save_to_disk`` folders and hub datasets."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from configs.data import DataSection
from configs.errors import PromptError
from configs.schema import PROMPT_FILES, PromptsSection
from tasks.inputs.saved_datasets import read_table, saved_files

_LINE_END = re.compile("\r\n|\n|\r")
#: Rows of a source, each with the number of its line or row.
Rows = Iterable[tuple[int, Mapping[str, Any]]]


def _text_rows(path: str, column: str) -> Rows:
    lines = list(_lines(path))
    while lines and not lines[-1].strip():
        lines.pop()
    for number, line in enumerate(lines, 1):
        yield number, {column: line.strip()}


def _jsonl_rows(path: str, column: str) -> Rows:
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            row = json.loads(line, parse_constant=_no_number)
        except (ValueError, RecursionError) as error:
            raise PromptError(f"{place} is not JSON: {error}. Each line must hold one object.") from None
        if not isinstance(row, dict):
            raise PromptError(f"{place} holds {type(row).__name__}; each line must hold one object.")
        yield number, row


def _lines(path: str) -> list[str]:
    """Return the lines of a text file; only a line feed, a carriage return or both end a line."""
    return _LINE_END.split(_text(path))


def _text(path: str) -> str:
    """Return the text of a file; raise PromptError if it is not UTF-8 or holds NUL characters."""
    data = Path(path).read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = len(_LINE_END.findall(data[: error.start].decode("utf-8-sig"))) + 1
        raise PromptError(f"{path}, line {line} is not UTF-8 text: {error.reason}. Save the file as UTF-8.") from None
    if "\0" in text:
        line = len(_LINE_END.findall(text[: text.index("\0")])) + 1
        raise PromptError(
            f"{path}, line {line} holds NUL characters, as files in UTF-16 do that are read as UTF-8. Save the file as "
            "UTF-8."
        )
    return text


def _separated_rows(path: str, delimiter: str) -> Rows:
    """Yield the rows of a CSV or TSV file with a header, by the line each begins in; all values are texts."""
    reader = csv.reader(io.StringIO(_text(path), newline=""), delimiter=delimiter, strict=True)
    names: list[str] = []
    begins = 1
    try:
        for values in reader:
            if values and not names:
                names = _columns(values, path, begins)
            elif values and len(values) != len(names):
                raise PromptError(
                    f"{path}, line {begins} has {len(values)} values, but the header names {len(names)} columns: "
                    f"{', '.join(names)[:200]}. Put a value that holds {delimiter!r} between double quotes."
                )
            elif values:
                yield begins, dict(zip(names, values, strict=True))
            begins = reader.line_num + 1
    except csv.Error as error:
        raise PromptError(
            f"{path}, line {begins} cannot be read: {error}. A value that begins with a double quote ends with one, "
            f"and those inside are written twice; a value has {csv.field_size_limit():,} characters at most."
        ) from None


def _columns(names: list[str], path: str, line: int) -> list[str]:
    wrong = next((name for name in names if not name.strip() or names.count(name) > 1), None)
    if wrong is not None:
        label = f"names the column {wrong!r} more than once" if wrong.strip() else "has a column without a name"
        raise PromptError(f"{path}, line {line}: the header {label}. Give each column a unique name.")
    return names


def _comma_rows(path: str, column: str) -> Rows:
    return _separated_rows(path, ",")


def _tab_rows(path: str, column: str) -> Rows:
    return _separated_rows(path, "\t")


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _parquet_rows(path: str, column: str) -> Rows:
    from pyarrow import parquet

    try:
        table = parquet.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise PromptError(f"'{path}' is not a Parquet file: {_first_line(error)}") from None
    yield from _table_rows(table, path)


def saved_rows(path: str, section: PromptsSection | DataSection, where: str) -> Rows:
    """Yield the rows of a folder that ``save_to_disk`` of datasets wrote.

    Raises:
        PromptError: the folder cannot be read, or has no such split.
    """
    yield from _table_rows(read_table(saved_files(Path(path), section.split, where)), path)


def _table_rows(table: pa.Table, path: str) -> Rows:
    values: dict[str, list[Any]] = {}
    for name, cells in zip(table.column_names, table.columns, strict=True):
        try:
            cells.validate(full=True)
            values[name] = cells.to_pylist()
        except (pa.ArrowException, ValueError, OverflowError) as error:
            raise PromptError(f"'{path}', column '{name}' cannot be read: {_first_line(error)}") from None
    for number in range(table.num_rows):
        yield number + 1, {name: cells[number] for name, cells in values.items()}


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


def hub_rows(source: str, section: PromptsSection | DataSection, where: str) -> Rows:
    """Yield the rows of a hub dataset.

    Raises:
        PromptError: the source is no dataset id, or the dataset cannot be loaded.
    """
    if source.startswith((".", "/")) or source.count("/") > 1 or (Path(source).suffix and "/" not in source):
        raise PromptError(
            f"{where}: '{source}' is neither a file ({', '.join(PROMPT_FILES)}), nor a folder that save_to_disk() of "
            "datasets wrote, nor a dataset id like 'owner/name'."
        )
    import datasets

    try:
        rows = datasets.load_dataset(source, split=section.split)
    except (OSError, ValueError, RuntimeError) as error:
        raise PromptError(
            f"{where}: dataset '{source}' (split '{section.split}') cannot be loaded: {error}. "
            f"Use a dataset id that can be reached, or a file that exists ({', '.join(PROMPT_FILES)})."
        ) from None
    yield from enumerate(rows, 1)


READERS: Mapping[str, Callable[[str, str], Rows]] = {
    ".txt": _text_rows,
    ".jsonl": _jsonl_rows,
    ".parquet": _parquet_rows,
    ".csv": _comma_rows,
    ".tsv": _tab_rows,
}
