"""A local file that is read in ranges."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path

from flowmill.storage.backends.base import BLOCK, FileEntry
from flowmill.storage.backends.checksums import check_block, check_range


class MappedFile:
    """A file mapped into memory; ranges are views."""

    def __init__(
        self,
        path: Path,
        *,
        where: str | None = None,
        entry: FileEntry | None = None,
        on_checked: Callable[[], None] = lambda: None,
    ) -> None:
        """Map the file; with an entry, each block is checked when it is first read.

        Args:
            where: its name in messages.
            entry: its size and checksums.
            on_checked: called when all blocks have been checked.
        """
        self._entry = entry
        self._on_checked = on_checked
        self._step = entry.block_size if entry else BLOCK
        self._checked: set[int] = set()
        self._where = where or str(path)
        self.size = path.stat().st_size
        self._view = memoryview(b"")
        if self.size:
            with path.open("rb") as file:
                self._view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    def read(self, offset: int, size: int) -> memoryview:
        """Return a view of a range."""
        check_range(offset, size, self.size, where=self._where)
        if self._entry is not None and size:
            self._check(offset // self._step, (offset + size - 1) // self._step, self._entry)
        return self._view[offset : offset + size]

    def _check(self, first: int, last: int, entry: FileEntry) -> None:
        for number in range(first, last + 1):
            if number not in self._checked:
                block = self._view[number * self._step : (number + 1) * self._step]
                check_block(block, number, entry, where=self._where)
                self._checked.add(number)
        if len(self._checked) == len(entry.blocks):
            self._entry = None
            self._on_checked()
