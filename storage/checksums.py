"""Checksums of committed files: of the whole, and of every block, so that a range can be trusted on its own."""

from __future__ import annotations

from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import xxhash

from configs.errors import CorruptError
from storage.roots.base import BLOCK, FileEntry

#: Bytes that are read, hashed and written at a time: what stays in the cache between the three.
_PIECE = 256 << 10
REMEDY = "Run 'flowmill store verify' to see what else is affected and 'flowmill store repair' to make it anew."


class Checksum:
    """The checksums of a file, taken while its content passes through memory."""

    def __init__(self) -> None:
        """Begin with an empty file."""
        self._whole, self._block = xxhash.xxh3_128(), xxhash.xxh3_64()
        self._blocks: list[str] = []
        self._size = 0

    def update(self, data: bytes | memoryview) -> None:
        """Append content."""
        view = memoryview(data)
        while len(view):
            # Both read a piece while the processor's cache still has it.
            piece = view[: min(_PIECE, BLOCK - self._size % BLOCK)]
            self._whole.update(piece)
            self._block.update(piece)
            self._size += len(piece)
            view = view[len(piece) :]
            if self._size % BLOCK == 0:
                self._end_block()

    def entry(self, name: str) -> FileEntry:
        """Return the entry of the file that is complete now."""
        if self._size % BLOCK:
            self._end_block()
        blocks = tuple(self._blocks) if len(self._blocks) > 1 else ()
        return FileEntry(name=name, size=self._size, xxh3=self._whole.hexdigest(), blocks=blocks)

    def _end_block(self) -> None:
        self._blocks.append(self._block.hexdigest())
        self._block.reset()


def describe_file(path: Path, name: str) -> FileEntry:
    """Return the entry of a finished file."""
    checksum = Checksum()
    with path.open("rb", buffering=0) as file:
        for piece in _pieces(file):
            checksum.update(piece)
    return checksum.entry(name)


def hash_file(path: Path) -> str:
    """Return the xxh3-128 of a file's content, hex."""
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        for piece in _pieces(file):
            digest.update(piece)
    return digest.hexdigest()


def _pieces(file: FileIO) -> Iterator[memoryview]:
    """Yield the content of a file in pieces, each overwritten by the next."""
    buffer = memoryview(bytearray(_PIECE))
    while size := file.readinto(buffer):
        yield buffer[:size]


def check_file(path: Path, entry: FileEntry, *, where: str) -> None:
    """Check one file against its record.

    Raises:
        CorruptError: it is missing, truncated or changed.
    """
    check_size(path.stat().st_size if path.exists() else None, entry, where=where)
    check_digest(hash_file(path), entry, where=where)


def check_digest(found: str, entry: FileEntry, *, where: str) -> None:
    """Check the xxh3-128 of a file's content.

    Raises:
        CorruptError: it is another one.
    """
    if found != entry.xxh3:
        raise CorruptError(f"{where} has checksum {found[:12]}, its commit record says {entry.xxh3[:12]}. {REMEDY}")


def check_size(size: int | None, entry: FileEntry, *, where: str) -> None:
    """Check the size of a file, None when it does not exist.

    Raises:
        CorruptError: it is another one.
    """
    if size is None:
        raise CorruptError(f"{where} is missing; its commit record names it with {entry.size} bytes. {REMEDY}")
    if size != entry.size:
        raise CorruptError(f"{where} has {size} bytes, its commit record says {entry.size}. {REMEDY}")


def check_block(data: bytes | memoryview, number: int, entry: FileEntry, *, where: str) -> None:
    """Check one block of a file of several blocks.

    Raises:
        CorruptError: its content is not what was committed.
    """
    expected = entry.blocks[number]
    found = xxhash.xxh3_64_hexdigest(data)
    if found != expected:
        raise CorruptError(
            f"{where}, bytes {number * BLOCK} to {number * BLOCK + len(data)}, have checksum {found}, "
            f"the commit record says {expected}. {REMEDY}"
        )


def check_range(offset: int, size: int, total: int, *, where: str) -> None:
    """Check that a range lies within a file.

    Raises:
        CorruptError: it does not.
    """
    if offset < 0 or size < 0 or offset + size > total:
        raise CorruptError(f"{where}: {size} bytes at {offset} lie outside the file of {total} bytes. {REMEDY}")
