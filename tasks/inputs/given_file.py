"""The content of one given sample: a text, a file, a cell of a table, or a member of a tar."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.errors import DataError
from storage.backends.checksums import hash_data
from tasks.inputs.remote_files import is_remote, remote_range

#: Suffixes of images and clips.
MEDIA = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".mp4", ".mov", ".webm", ".mkv")
#: Most bytes of one sample, and of one text in a tar.
MOST_BYTES, MOST_TEXT = 1 << 30, 1 << 24
#: Returns the bytes in a row and column of the table that the rows come from.
Cells = Callable[[int, str], bytes]


def too_many_bytes(size: int, most: int = MOST_BYTES) -> str:
    """Return the complaint about a file that is too large, or about the size that it claims; '' otherwise."""
    return f"has {size:,} bytes, more than {most:,}" if not 0 <= size <= most else ""


def is_unicode(text: str) -> bool:
    """Return whether a text has no halves of characters, which stand for bytes that are no text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class GivenFile:
    """The content of one given sample; it is read on demand."""

    name: str
    """Name for messages."""
    key: str = ""
    """Identity of the content; empty for a file that was not read yet."""
    text: str | None = None
    """The sample itself, if it is a text."""
    folder: str = ""
    """Folder of its file, or of the tar that holds it; may be on S3."""
    path: str = ""
    """Path of the file below the folder; the column of a cell."""
    offset: int = 0
    """First byte in the tar; row of a cell."""
    size: int | None = None
    """Bytes in the tar; None: the whole file."""
    is_chat: bool = False
    """Whether the text is the JSON of a chat's messages."""
    cells: Cells | None = field(default=None, compare=False)
    """Reads cells, if the sample is one."""

    def stored(self) -> list[Any]:
        """Return plain values, from which ``restored`` makes the same content."""
        place = (self.folder, self.path, self.offset, self.size)
        return [self.name, self.key, self.text, *place, self.is_chat, self.cells is not None]

    @staticmethod
    def restored(values: list[Any], cells: Cells) -> GivenFile:
        """Return a content from its plain values."""
        name, key, text, folder, path, offset, size, is_chat, is_cell = values
        return GivenFile(name, key, text, folder, path, offset, size, is_chat, cells if is_cell else None)

    def read(self) -> bytes:
        """Return the bytes of an image or clip.

        Raises:
            DataError: it is a text, cannot be read, or has changed since the rows were read.
        """
        if self.text is not None:
            raise DataError(
                f"{self.name}: {self.text[:60]!r} is a text, not the path of an image or clip. Mend the row."
            )
        try:
            found = self._bytes()
        except OSError as error:
            raise DataError(f"{self.name} cannot be read: {error}. Put it back.") from None
        changed = hash_data(found) != self.key if self.size is None else len(found) != self.size
        if changed:
            raise DataError(f"{self.name} was changed since the rows were read. Give the same command again.")
        return found

    def _bytes(self) -> bytes:
        if self.cells is not None:
            return self.cells(self.offset, self.path)
        if is_remote(self.folder):
            return remote_range(self.folder, self.path, self.offset, self.offset + (self.size or 0))
        with (Path(self.folder) / self.path).open("rb") as file:
            file.seek(self.offset)
            return file.read(MOST_BYTES if self.size is None else self.size)
