"""The content of one sample of data: a text, a file, a cell of a table, or a member of a tar."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flowmill.configs.errors import DataError
from flowmill.storage.backends.checksums import hash_data
from flowmill.tasks.inputs.rows.read import read_again


@dataclass(frozen=True, slots=True)
class DataFile:
    """The content of one sample of data; it is read on demand."""

    name: str
    key: str = ""
    """Identity of the content; empty for a file that was not read yet."""
    text: str | None = None
    """The sample itself, if it is a text."""
    folder: str = ""
    """Folder of its file, or of the table or tar that holds it; may be on S3."""
    path: str = ""
    """Path of the file below the folder."""
    offset: int = 0
    """First byte in the tar; row of a cell."""
    size: int | None = None
    """Bytes in the tar; None: the whole file."""
    is_chat: bool = False
    """Whether the text is the JSON of a chat's messages."""
    column: tuple[str | int, ...] = ()
    """Column of a cell, and its place in there."""

    def stored(self) -> list[Any]:
        """Return plain values, from which ``restored`` makes the same content."""
        return [getattr(self, name) for name in self.__slots__]

    @staticmethod
    def restored(values: list[Any]) -> DataFile:
        """Return a content from its plain values."""
        return DataFile(*[*values[:-1], tuple(values[-1])])

    def read(self) -> bytes:
        """Return the bytes of an image or clip."""
        if self.text is not None:
            raise DataError(
                f"{self.name}: {self.text[:60]!r} is a text, not the path of an image or clip. Mend the row."
            )
        try:
            data = read_again(f"{self.folder}/{self.path}", self.offset, self.size, self.column)
        except OSError as error:
            raise DataError(f"{self.name} cannot be read: {error}. Put it back.") from None
        if hash_data(data) != self.key:
            raise DataError(f"{self.name} was changed since the rows were read. Give the same command again.")
        return data
