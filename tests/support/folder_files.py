"""The files of a folder as readers of shards see them, without a store."""

from __future__ import annotations

from pathlib import Path

from flowmill.configs.errors import CorruptError
from flowmill.storage.backends.base import Blob
from flowmill.storage.backends.mapped_file import MappedFile


class FolderFiles:
    """Files of a plain folder, outside a store."""

    def __init__(self, folder: Path) -> None:
        """Bind to a folder."""
        self.where = str(folder)
        self._folder = folder

    def blob(self, name: str) -> Blob:
        """Open a file for reading in ranges."""
        if not (self._folder / name).is_file():
            raise CorruptError(f"{self._folder / name} is missing.")
        return MappedFile(self._folder / name)
