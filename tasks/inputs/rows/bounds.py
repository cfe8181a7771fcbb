"""Bounds on memory while rows of data and prompts are read: of samples, texts, lines and headers in tars.

Sizes that files claim are checked before anything of that size is read. Bounds of tables: ``arrow_bounds``.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Mapping
from typing import IO, Any, TextIO

#: Most bytes of one sample, and of one text.
MOST_BYTES, MOST_TEXT = 1 << 30, 1 << 24
#: Most bytes of the text of a tar's member and of the headers of the next.
_MOST_MEMBER = MOST_TEXT + (1 << 20)


def too_many_bytes(size: int, most: int = MOST_BYTES) -> str:
    """Return the complaint on a file that is too large, or on the size that it claims; '' otherwise."""
    return f"has {size:,} bytes, more than {most:,}" if not 0 <= size <= most else ""


def content_bytes(value: Any) -> int:
    """Return the bytes of the texts and files in plain values, roughly."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, list | tuple):
        return sum(map(content_bytes, value))
    return sum(map(content_bytes, value.values())) if isinstance(value, Mapping) else 8


class BoundedLines:
    """The lines of a text file; an empty one instead of one that is too long."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self.too_long = False
        """Whether the last line, or one since this was set to False, was too long."""

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._file.readline(MOST_TEXT)
        if not line:
            raise StopIteration
        if len(line) < MOST_TEXT:
            return line
        while line and line[-1] not in "\r\n":
            line = self._file.readline(MOST_TEXT)
        self.too_long = True
        return "\n"


class BoundedTar:
    """A tar as a file for ``tarfile``, which reads headers as a whole, whatever their size."""

    def __init__(self, file: IO[bytes]) -> None:
        self.seek, self.tell, self._read = file.seek, file.tell, file.read
        self._left = _MOST_MEMBER

    def next_member(self) -> None:
        """Begin to count again."""
        self._left = _MOST_MEMBER

    def read(self, size: int) -> bytes:
        """Return bytes; raise TarError if there are too many of one member."""
        self._left -= size
        if size < 0 or self._left < 0:
            raise tarfile.ReadError(f"a member has headers of more than {_MOST_MEMBER:,} bytes")
        return self._read(size)
