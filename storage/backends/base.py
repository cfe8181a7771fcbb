"""The interface between a store and its file system.

A root creates small objects exclusively, publishes folders of finished files, and reads. The code above it is the same
for every kind of storage. Paths are relative to the root, with forward slashes.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol, TypeVar

from pydantic import ConfigDict, Field

from flowmill.configs.errors import StoreError
from flowmill.storage.backends.process_tags import is_gone, is_tag, tag
from flowmill.storage.layout import STAGING
from flowmill.storage.names import Digest, Inside

Item = TypeVar("Item")
Result = TypeVar("Result")
#: Seconds after which a staging folder of any machine counts as abandoned.
_STALE_S = 7 * 86400.0
BLOCK = 1 << 20
"""Bytes per separately checked block: small enough to stay in the CPU cache until it is used."""
PART = 4 << 20
"""Bytes per read on remote roots; also the block size of records up to version 3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One committed file."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: Inside
    """Path below the shard's folder."""
    size: Annotated[int, Field(ge=0, strict=True)]
    """Bytes."""
    xxh3: Digest
    """xxh3-128, hex: of the content for a file of one block, of the digests of the blocks for a larger one."""
    blocks: tuple[Digest, ...] = ()
    """xxh3-128 of each MiB of the content, hex; absent in records of version 1 and for files of one block.

    Up to version 3 xxh3-64 of each 4 MiB, and ``xxh3`` is that of the content at any size.
    """

    @property
    def by_blocks(self) -> bool:
        """Whether ``xxh3`` is the checksum of the blocks' checksums."""
        return bool(self.blocks) and len(self.blocks[0]) == len(self.xxh3)

    @property
    def block_size(self) -> int:
        """Bytes of each block except the last."""
        return BLOCK if self.by_blocks else PART

    def __post_init__(self) -> None:
        """Check that the checksums of blocks fit the size.

        Raises:
            ValueError: they do not.
        """
        if self.blocks and len(self.blocks) != -(-self.size // self.block_size):
            raise ValueError(f"'{self.name}' of {self.size} bytes has checksums of {len(self.blocks)} blocks")


class Blob(Protocol):
    """A committed file for reading in ranges."""

    size: int

    def read(self, offset: int, size: int) -> memoryview:
        """Return the bytes of a range; read-only, a view of the file if possible."""


class Root(Protocol):
    """A file system of stores."""

    uri: str
    disk: str
    """Local folder where new files are written first."""

    def create(self, path: str, data: bytes) -> bool:
        """Write a small object exclusively and durably; False when it already exists."""

    def publish(self, folder: Path, path: str) -> None:
        """Make a folder of finished files visible under ``path``, durably. ``path`` contains the content digest."""

    def read(self, path: str) -> bytes | None:
        """Return the bytes of a small object, or None when it does not exist."""

    def read_many(self, paths: list[str]) -> list[bytes | None]:
        """Return the bytes of several small objects, None for those that do not exist."""

    def map(self, function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """Return the results of a function for each item, in their order; concurrent where requests take time."""

    def list(self, path: str) -> list[str]:
        """Return the sorted names directly below ``path``; empty when it does not exist."""

    def files(self, path: str) -> Mapping[str, int]:
        """Return the size of every file below ``path`` by its path below it."""

    def fetch(self, path: str, entry: FileEntry) -> Path:
        """Return a local path of the committed file ``path``/``entry.name``, checked once per process."""

    def check(self, path: str, entry: FileEntry) -> None:
        """Read the committed file ``path``/``entry.name`` again and compare every byte."""

    def blob(self, path: str, entry: FileEntry) -> Blob:
        """Open the committed file ``path``/``entry.name`` for reading in ranges."""

    def move(self, path: str, target: str) -> None:
        """Move an object or folder without other writers within the root."""

    def remove(self, path: str) -> None:
        """Remove an object or folder; a no-op when it does not exist."""

    def remove_below(self, path: str, chosen: Callable[[str], bool]) -> None:
        """Remove the objects and folders directly below a folder whose names are chosen."""
        ...

    def staging(self) -> contextlib.AbstractContextManager[Path]:
        """Provide a private local folder for writing; it is removed afterwards in any case."""

    def sweep(self) -> int:
        """Remove half-written files of killed processes of this host; return the number of entries."""

    def lock(self, path: str, label: str) -> contextlib.AbstractContextManager[None]:
        """Hold an advisory lock, or raise RunConflictError naming ``label`` when another process holds it."""

    def locked(self, path: str) -> bool:
        """Return whether a process holds a lock; nothing is written."""


class Staging:
    """Private local folders below one folder; their names identify their processes."""

    def __init__(self, folder: Path) -> None:
        """Create the folder if needed, and remove leftovers of killed processes; raise StoreError if it is a link."""
        self.folder = folder / STAGING
        _refuse_link(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):
            self.sweep()

    @contextlib.contextmanager
    def make(self) -> Iterator[Path]:
        """Provide a private folder; removed afterwards."""
        folder = self.folder / tag()
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def sweep(self) -> int:
        """Remove files of killed processes, and files too old to be in use; return the number of entries."""
        entries = leftovers(self.folder, _STALE_S)
        for entry in entries:
            discard(entry)
        return len(entries)


def leftovers(folder: Path, stale_s: float) -> dict[Path, float]:
    """Return the seconds since the last change of each entry of a staging folder that no process uses.

    Those are entries of processes of this machine that are gone, and all that are unchanged for ``stale_s`` seconds.
    Other names are not of flowmill and do not count. Raises StoreError if the folder is a link.
    """
    _refuse_link(folder)
    own = [entry for entry in folder.iterdir() if is_tag(_tag_of(entry))] if folder.is_dir() else []
    ages = {entry: _unchanged_s(entry) for entry in own}
    return {entry: age for entry, age in ages.items() if age > stale_s or is_gone(_tag_of(entry))}


def discard(entry: Path) -> None:
    """Remove an entry of a staging folder."""
    _refuse_link(entry.parent)
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry, ignore_errors=True)
    else:
        entry.unlink(missing_ok=True)


def _tag_of(entry: Path) -> str:
    return entry.name.removesuffix(".tmp")


def _refuse_link(folder: Path) -> None:
    if folder.is_symlink():
        raise StoreError(
            f"'{folder}' is a link to '{folder.readlink()}': unfinished files would be written and removed there. "
            "Remove the link; flowmill makes a folder in its place."
        )


def _unchanged_s(entry: Path) -> float:
    """Return the seconds since the last change of an entry or a file in it; 0 if the entry no longer exists."""
    try:
        return time.time() - max(each.stat().st_mtime for each in (entry, *entry.rglob("*")))
    except FileNotFoundError:
        return 0.0
