"""Reads rows of prompt files (``configs.schema.PROMPT_FILES``) and hub datasets.

Rows are read one after the other, so memory does not grow with their number.
"""

from __future__ import annotations

import contextlib
import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from configs.data import DataSection
from configs.errors import PromptError, first_line
from configs.schema import PROMPT_FILES, PromptsSection
from tasks.inputs.prompt_rows import Rows

_LINE_END = re.compile("[\r\n]+$")
#: Seconds in which the hub has to answer.
_ANSWER_S = 10.0
#: The same, with an error in the place of a row that cannot be read.
ReadRows = Iterable[tuple[int, Mapping[str, Any] | PromptError]]


def _text_rows(path: str, column: str) -> ReadRows:
    blank: list[tuple[int, Mapping[str, Any] | PromptError]] = []
    for number, line in _lines(path):
        row = line if isinstance(line, PromptError) else {column: line.strip()}
        blank.append((number, row))
        if isinstance(row, PromptError) or row[column]:
            yield from blank
            blank = []


def _jsonl_rows(path: str, column: str) -> ReadRows:
    for number, line in _lines(path):
        if isinstance(line, PromptError):
            yield number, line
            continue
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            row = json.loads(line, parse_constant=_no_number)
        except (ValueError, RecursionError) as error:
            yield number, PromptError(f"{place} is not JSON: {error}. Each line must hold one object.")
            continue
        kind = type(row).__name__
        yield number, row if kind == "dict" else PromptError(f"{place} holds {kind}; each line must hold one object.")


def _lines(path: str) -> Iterator[tuple[int, str | PromptError]]:
    """Yield the lines of a text file; only a line feed, a carriage return or both end a line."""
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            yield number, _bad_text(line, f"{path}, line {number}") or _LINE_END.sub("", line)


def _opened(path: str) -> Any:
    # Bytes that are no UTF-8 become halves of characters, which ``_bad_text`` finds, so that other lines are read.
    return Path(path).open(encoding="utf-8-sig", errors="surrogateescape", newline="")


def _bad_text(text: str, place: str) -> PromptError | None:
    """Return the complaint about text of a file that is not UTF-8 or holds NUL characters."""
    if "\0" in text:
        return PromptError(
            f"{place} holds NUL characters, as files in UTF-16 do that are read as UTF-8. Save the file as UTF-8."
        )
    if text.isascii():
        return None
    try:
        text.encode("utf-8", "surrogateescape").decode()
    except UnicodeDecodeError as error:
        return PromptError(f"{place} is not UTF-8 text: {error.reason}. Save the file as UTF-8.")
    return None


def _separated_rows(path: str, delimiter: str) -> ReadRows:
    """Yield the rows of a CSV or TSV file with a header, by the line each begins in; all values are texts."""
    with _opened(path) as file:
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        names: list[str] = []
        while True:
            begins = reader.line_num + 1
            place = f"{path}, line {begins}"
            try:
                values = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                bad = PromptError(
                    f"{place} cannot be read: {error}. A value that begins with a double quote ends with one, and "
                    "those inside are written twice; a value has "
                    f"{csv.field_size_limit():,} characters at most."
                )
                yield begins, bad
                continue
            wrong = _bad_text("".join(values), place)
            if values and not names:
                if wrong:
                    raise wrong
                names = _columns(values, path, begins)
            elif wrong:
                yield begins, wrong
            elif values and len(values) != len(names):
                yield (
                    begins,
                    PromptError(
                        f"{place} has {len(values)} values, but the header names {len(names)} columns: "
                        f"{', '.join(names)[:200]}. Put a value that holds {delimiter!r} between double quotes."
                    ),
                )
            elif values:
                yield begins, dict(zip(names, values, strict=True))


def _columns(names: list[str], path: str, line: int) -> list[str]:
    wrong = next((name for name in names if not name.strip() or names.count(name) > 1), None)
    if wrong is not None:
        label = f"names the column {wrong!r} more than once" if wrong.strip() else "has a column without a name"
        raise PromptError(f"{path}, line {line}: the header {label}. Give each column a unique name.")
    return names


def _comma_rows(path: str, column: str) -> ReadRows:
    return _separated_rows(path, ",")


def _tab_rows(path: str, column: str) -> ReadRows:
    return _separated_rows(path, "\t")


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def hub_rows(source: str, section: PromptsSection | DataSection, where: str, start: int = 0) -> Rows:
    """Yield the rows of a hub dataset, from the one after the first ``start``.

    Raises:
        PromptError: the source is no dataset id, or the dataset cannot be loaded.
    """
    if source.startswith((".", "/")) or source.count("/") > 1 or (Path(source).suffix and "/" not in source):
        raise PromptError(
            f"{where}: '{source}' is neither a file ({', '.join(PROMPT_FILES)}), nor a folder that save_to_disk() of "
            "datasets wrote, nor a dataset id like 'owner/name'."
        )
    import datasets
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError, OfflineModeIsEnabled

    try:
        # The library itself would ask a hub that does not answer for many minutes.
        with contextlib.suppress(OfflineModeIsEnabled):
            HfApi().dataset_info(source, timeout=_ANSWER_S)
        rows = datasets.load_dataset(source, split=section.split)
    except (HTTPError, OSError, ValueError, RuntimeError) as error:
        raise PromptError(
            f"{where}: dataset '{source}' (split '{section.split}') cannot be loaded: {first_line(error)}. "
            f"Use a dataset id that can be reached, or a file that exists ({', '.join(PROMPT_FILES)}). With "
            "HF_HUB_OFFLINE=1 the hub is not asked, and a downloaded copy is used."
        ) from None
    yield from islice(enumerate(rows, 1), start, None)


def read_rows(path: str, column: str) -> ReadRows:
    """Yield the rows of a file, and an error for each that cannot be read, after which the others follow.

    Raises:
        PromptError: the file as a whole cannot be read.
    """
    return _ROWS[Path(path).suffix.lower()](path, column)


def _all_readable(path: str, column: str) -> Rows:
    for number, row in read_rows(path, column):
        if isinstance(row, PromptError):
            raise row
        yield number, row


def _parquet_rows(path: str, column: str) -> Rows:
    from tasks.inputs.arrow_rows import parquet_rows

    return parquet_rows(path)


_ROWS: Mapping[str, Callable[[str, str], ReadRows]] = {
    ".txt": _text_rows,
    ".jsonl": _jsonl_rows,
    ".parquet": _parquet_rows,
    ".csv": _comma_rows,
    ".tsv": _tab_rows,
}
READERS: Mapping[str, Callable[[str, str], Rows]] = dict.fromkeys(_ROWS, _all_readable)
"""Readers of files by suffix, which raise PromptError at the first row that cannot be read."""
