"""A row of a source: where it is, and the images and clips that it holds."""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from flowmill.configs.errors import DataError
from flowmill.storage.backends.checksums import hash_data
from flowmill.storage.names import below, inside

#: Suffixes of images and clips.
MEDIA = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".mp4", ".mov", ".webm", ".mkv")
#: Suffixes of compressed files.
PACKED = (".gz", ".bz2", ".xz")
#: Suffixes of files whose rows are known by the line they begin in, and of the other files that hold rows.
LINES, OTHERS = (".txt", ".jsonl", ".ndjson", ".csv", ".tsv"), (".json", ".parquet", ".arrow", ".tar")


#: Base64 of the first bytes of PNG, JPEG, WebP, GIF and MP4, or the head of a URL before any.
#: Name of a folder whose images count several times, as kohya's trainers name them: number, and what they show.
REPEATED = re.compile(r"(\d+)_(.+)")
_BASE64 = re.compile(
    r"(data:[\w.+-]+/[\w.+-]+;base64,|(?=(iVBORw0KGgo|/9j/|UklGR|R0lGOD|AAAA[A-Za-z0-9+/]{2}ZnR5cA))(?=.{60}))"
    r"(?P<data>[A-Za-z0-9+/]+=*)\s*$"
)


class RowLocation(NamedTuple):
    """Location of a row, for errors: file and number, or the image that is the row."""

    where: str
    source: str
    number: int
    before: int = 0
    """Number of rows in earlier files of the source."""

    def __str__(self) -> str:
        unit = _unit_of(self.source)
        return f"{self.where}: {self.source}, {unit} {self.number}" if unit else f"{self.where}: {self.source}"


@dataclass(frozen=True, slots=True)
class Media:
    """An image, clip or sound inside a file of rows: a cell of a table, or a member of a tar."""

    name: str
    """Name for messages: the column, or the member of the tar."""
    key: str
    """Checksum of the content."""
    start: int
    """Row of the cell, or first byte in the tar."""
    size: int | None = None
    """Bytes in the tar; None: a cell."""
    column: tuple[str | int, ...] = ()
    """Column of the cell, and its place in there."""
    data: bytes | None = field(default=None, repr=False, compare=False)
    """The content of a cell."""


#: Rows of a file, each with its number, or the error in the place of one that cannot be read.
Rows = Iterable[tuple[int, Mapping[str, Any] | DataError]]


class Names(NamedTuple):
    """Columns of what a source holds without naming it."""

    prompt: str = "prompt"
    """Of lines of texts, and of texts next to images."""
    sample: str = "image"
    """Of images."""
    empty: bool = False
    """Whether texts next to images may be empty."""
    texts: frozenset[str] = frozenset()
    """Extensions of tars whose members are read as texts."""
    folders: bool = False
    """Whether the name of its folder is the text of an image without one, see ``REPEATED``."""


def ending_of(name: str) -> str:
    """Return the suffix of a file of rows, without that of compression; '' for any other file."""
    name = re.sub(r"\.tgz$", ".tar.gz", name.lower())
    name = name[:-3] if name.endswith((".gz", ".xz")) else name.removesuffix(".bz2")
    return next((ending for ending in (*LINES, *OTHERS) if name.endswith(ending)), "")


def dataset_id(source: str) -> str | None:
    """Return the id of a dataset of the hub that a config names; None for a file or folder."""
    # Loading a config makes existing paths absolute.
    return None if ending_of(source) or source.startswith("/") else source


@lru_cache(maxsize=1024)
def _unit_of(source: str) -> str:
    if source.lower().endswith(MEDIA):
        return ""
    return "line" if ending_of(source) in LINES else "row"


def decoded(value: Any) -> bytes | None:
    """Return the image or clip that a text holds in base64, as such or as a data URL; None for any other value."""
    match = _BASE64.match(value) if isinstance(value, str) else None
    try:
        return None if match is None else b64decode(match["data"], validate=True)
    except ValueError:
        return None


def as_media(value: Any, number: int, column: tuple[str | int, ...]) -> Any:
    """Return the image or clip of a text in base64, in a column of the row of a number; another value as it is."""
    data = decoded(value)
    return value if data is None else Media(str(column[0]), hash_data(data), number, column=column, data=data)


def placed(folder: Path, name: str) -> Path:
    """Return the path of a name below a folder, see ``below``; of a snapshot of the hub's cache, whose files are links
    to its blobs, also of these."""
    *above, _ = folder.resolve().parts if "snapshots" in folder.parts else ("",)
    if "snapshots" in above:
        path = folder / inside(name)
        blobs = Path(*above[: len(above) - above[::-1].index("snapshots") - 1]) / "blobs"
        if path.resolve().is_relative_to(blobs):
            return path
    return below(folder, name)


def is_of_mac(path: str) -> bool:
    """Return whether a file only has notes of macOS about another one, or about a folder."""
    name = path.rpartition("/")[2]
    return name.startswith("._") or name == ".DS_Store" or "__MACOSX/" in path


def is_unicode(text: str) -> bool:
    """Return whether a text has no halves of characters, which stand for bytes that are no text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
