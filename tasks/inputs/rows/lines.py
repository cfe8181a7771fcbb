"""Rows of lines, JSON and separated values, compressed or not; an error in the place of each that cannot be read.

Rows are read one after the other, so memory does not grow with their number.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple, TextIO, cast

from flowmill.configs.errors import DataError
from flowmill.tasks.inputs.rows.bounds import MOST_TEXT, BoundedLines
from flowmill.tasks.inputs.rows.row import Rows, ending_of

#: Characters of the first line of a table that are looked at, and of JSON that are read at a time.
_MOST_HEADER, _PIECE = 1 << 16, 1 << 16
_SPACE = re.compile(r"\s*")
#: Signs between the values of a table.
_SIGNS = ",;\t|"
#: Errors of files that are damaged or cannot be read.
DAMAGED = (OSError, EOFError, zlib.error, lzma.LZMAError)


def unpacked(path: str, name: str) -> IO[bytes]:
    """Return a file for reading, decompressed as its name says."""
    ending = Path(name).suffix.lower()
    if ending in (".gz", ".tgz"):
        return cast("IO[bytes]", gzip.open(path, "rb"))
    if ending in (".bz2", ".xz"):
        return cast("IO[bytes]", bz2.open(path, "rb") if ending == ".bz2" else lzma.open(path, "rb"))
    return Path(path).open("rb")


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_number)


class File(NamedTuple):
    """A file of rows."""

    name: str
    """Where it is, for messages; may be on S3."""
    path: str
    """The same, or a copy on this machine."""


def text_rows(file: File, column: str) -> Rows:
    """Yield the lines of a text file, each in a column, but for empty ones at the end."""
    blank: list[tuple[int, Mapping[str, Any] | DataError]] = []
    for number, line in _lines(file):
        row = line if isinstance(line, DataError) else {column: line.strip()}
        blank.append((number, row))
        if isinstance(row, DataError) or row[column]:
            yield from blank
            blank = []


def json_rows(file: File) -> Rows:
    """Yield the objects of a file, one per line."""
    for number, line in _lines(file):
        if isinstance(line, DataError):
            yield number, line
            continue
        if not line.strip():
            continue
        try:
            row = _DECODER.decode(line)
        except (ValueError, RecursionError) as error:
            problem = f"is not JSON: {error}. Each"
        else:
            problem = "" if type(row) is dict else f"holds {type(row).__name__}; each"
        yield number, DataError(f"{file.name}, line {number} {problem} line must hold one object.") if problem else row


def array_rows(file: File) -> Rows:
    """Yield the objects of a JSON array, or of a file with one per line; no more than one object is in memory."""
    with _opened(file) as opened:
        if not opened.read(_PIECE).lstrip().startswith("["):
            yield from json_rows(file)
            return
        opened.seek(0)
        yield from _elements(opened, file.name)


def _elements(opened: TextIO, name: str) -> Rows:
    array, number = _Array(opened), 1
    try:
        while array.sign() == ("[" if number == 1 else ",") and not (number == 1 and array.is_empty()):
            raw, row = array.element()
            wrong = _bad_text(raw) or ("" if type(row) is dict else f"holds {type(row).__name__}; a row is an object.")
            yield number, DataError(f"{name}, row {number} {wrong}") if wrong else row
            number += 1
        array.check_end()
    except (ValueError, RecursionError) as error:
        yield number, DataError(f"{name}, row {number} is not JSON: {error}. Mend it; rows after it are not read.")


class _Array:
    """The elements of a JSON array, of which no more than one is in memory."""

    def __init__(self, file: TextIO) -> None:
        self._file, self._text, self._at = file, "", 0

    def _more(self) -> bool:
        piece = self._file.read(max(_PIECE, len(self._text) - self._at))
        self._text, self._at = self._text[self._at :] + piece, 0
        return bool(piece)

    def _next(self) -> str:
        while True:
            match = _SPACE.match(self._text, self._at)
            self._at = match.end() if match else self._at
            if self._at < len(self._text) or not self._more():
                return self._text[self._at : self._at + 1]

    def is_empty(self) -> bool:
        """Return whether the array ends where its first element would be."""
        return self._next() == "]"

    def sign(self) -> str:
        """Return the next sign, and go past it if it is one between elements."""
        sign = self._next()
        self._at += sign in ("[", ",")
        return sign

    def element(self) -> tuple[str, Any]:
        """Return the next element as written, and its value."""
        self._next()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except (ValueError, RecursionError):
                if len(self._text) - self._at > MOST_TEXT:
                    raise ValueError(f"it has more than {MOST_TEXT:,} characters") from None
                if not self._more():
                    raise
            else:
                raw, self._at = self._text[self._at : end], end
                return raw, value

    def check_end(self) -> None:
        """Raise ValueError if the array does not end here, or something follows."""
        sign, self._at = self._next(), self._at + 1
        if sign != "]" or self._next():
            raise ValueError("the list does not end here" if sign else "the file ends inside the list")


def _lines(file: File) -> Iterator[tuple[int, str | DataError]]:
    """Yield the lines of a text file; only a line feed, a carriage return or both end a line."""
    with _opened(file) as opened:
        lines = BoundedLines(opened)
        for number, line in enumerate(lines, 1):
            wrong = _too_long(lines) or _bad_text(line)
            yield number, DataError(f"{file.name}, line {number} {wrong}") if wrong else line.rstrip("\r\n")


def _too_long(lines: BoundedLines) -> str:
    """Return the complaint about a line that is too long, once; '' otherwise."""
    if not lines.too_long:
        return ""
    lines.too_long = False
    return f"has more than {MOST_TEXT:,} characters. Write images into files of their own."


def _opened(file: File) -> TextIO:
    # Bytes that are no UTF-8 become halves of characters, which ``_bad_text`` finds, so that other lines are read.
    return io.TextIOWrapper(unpacked(*file[::-1]), "utf-8-sig", "surrogateescape", newline="")


def _bad_text(text: str) -> str:
    """Return the complaint about text of a file that is not UTF-8 or holds NUL characters; '' otherwise."""
    if "\0" in text:
        return "holds NUL characters, as files in UTF-16 do that are read as UTF-8. Save the file as UTF-8."
    if text.isascii():
        return ""
    try:
        text.encode("utf-8", "surrogateescape").decode()
    except UnicodeDecodeError as error:
        return f"is not UTF-8 text: {error.reason}. Save the file as UTF-8."
    return ""


def separated_rows(file: File) -> Rows:
    """Yield the rows of a table with a header, by the line each begins in; all values are texts."""
    with _opened(file) as opened:
        sign = _separator(opened, "\t" if ending_of(file.name) == ".tsv" else ",")
        lines, names = BoundedLines(opened), list[str]()
        reader = csv.reader(lines, delimiter=sign, strict=True)
        while True:
            begins = reader.line_num + 1
            try:
                values = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                place = f"{file.name}, line {begins}"
                bad = DataError(
                    f"{place} cannot be read: {error}. A value that begins with a double quote ends with one, and "
                    f"those inside are written twice; a value has {csv.field_size_limit():,} characters at most."
                )
                yield begins, bad
                continue
            wrong = _too_long(lines) or _bad_text("".join(values))
            if names and not wrong and values and len(values) != len(names):
                wrong = (
                    f"has {len(values)} values, but the header names {len(names)} columns: {', '.join(names)[:200]}. "
                    f"Put a value that holds {sign!r} between double quotes."
                )
            if wrong:
                bad = DataError(f"{file.name}, line {begins} {wrong}")
                if not names:
                    raise bad
                yield begins, bad
            elif values and not names:
                names = _columns(values, file.name, begins)
            elif values:
                yield begins, dict(zip(names, values, strict=True))


def _separator(opened: TextIO, usual: str) -> str:
    """Return the sign between the names of a header: the usual one, or another if it has that alone."""
    lines = iter(lambda: opened.readline(_MOST_HEADER), "")
    header = next((line.strip() for line in lines if line.strip()), "")
    opened.seek(0)
    return usual if usual in header else max(usual + _SIGNS, key=header.count)


def _columns(names: list[str], path: str, line: int) -> list[str]:
    wrong = next((name for name in names if not name.strip() or names.count(name) > 1), None)
    if wrong is not None:
        label = f"names the column {wrong!r} more than once" if wrong.strip() else "has a column without a name"
        raise DataError(f"{path}, line {line}: the header {label}. Give each column a unique name.")
    return names
