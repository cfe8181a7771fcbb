"""Rows of prompt files, .txt, .jsonl and .parquet, and of Hugging Face datasets."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from configs.errors import PromptError
from configs.schema import PromptsSection

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
    """Return the lines of a text file: they end with a line feed, a carriage return or both, and with nothing else."""
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
    return _LINE_END.split(text)


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _parquet_rows(path: str, column: str) -> Rows:
    from pyarrow import parquet

    try:
        table = parquet.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise PromptError(f"'{path}' is not a Parquet file: {_first_line(error)}") from None
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


def hub_rows(source: str, section: PromptsSection, where: str) -> Rows:
    """Return the rows of a dataset.

    Raises:
        PromptError: it cannot be loaded, or is none.
    """
    if source.startswith((".", "/")) or source.count("/") > 1 or (Path(source).suffix and "/" not in source):
        raise PromptError(
            f"{where}: '{source}' is neither a .txt, .jsonl or .parquet file nor a dataset id like 'owner/name'."
        )
    import datasets

    try:
        rows = datasets.load_dataset(source, split=section.split)
    except (OSError, ValueError, RuntimeError) as error:
        raise PromptError(
            f"{where}: dataset '{source}' (split '{section.split}') cannot be loaded: {error}. "
            "Use a dataset id that can be reached, or a .txt, .jsonl or .parquet file that exists."
        ) from None
    yield from enumerate(rows, 1)


READERS: Mapping[str, Callable[[str, str], Rows]] = {
    ".txt": _text_rows,
    ".jsonl": _jsonl_rows,
    ".parquet": _parquet_rows,
}
