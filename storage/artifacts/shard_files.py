"""Read access to the files of one shard: opened by name, read in ranges, checked against the commit record."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from flowmill.configs.errors import CorruptError
from flowmill.storage.backends.base import Blob, FileEntry, Root


class Files(Protocol):
    """The files of one shard."""

    where: str
    """Their name in messages."""

    def blob(self, name: str) -> Blob:
        """Open a file for reading in ranges."""


class ShardFiles:
    """The committed files of one shard; each is checked on first use."""

    def __init__(self, root: Root, path: str, files: Sequence[FileEntry]) -> None:
        """Bind to the files ``files`` below ``path``."""
        self.where = path
        self._root = root
        self._entries = {file.name: file for file in files}

    def blob(self, name: str) -> Blob:
        """Open a file for reading in ranges."""
        return self._root.blob(self.where, self._entry(name))

    def path(self, name: str) -> Path:
        """Return a local path of a file."""
        return self._root.fetch(self.where, self._entry(name))

    def _entry(self, name: str) -> FileEntry:
        if name not in self._entries:
            names = ", ".join(self._entries) or "nothing"
            raise CorruptError(f"{self.where} has no '{name}'; its commit record names {names}.")
        return self._entries[name]
