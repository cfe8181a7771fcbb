"""Checksums of committed files: of every block, so that a range can be verified separately, and of the whole file.

A file of one block has the xxh3-128 of its content. A larger file has the xxh3-128 of its blocks' xxh3-128 digests (a
hash tree), so that no byte is hashed twice. Records up to version 3 have the xxh3-128 of the content at any size and
the xxh3-64 of each 4 MiB.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from io import FileIO
from pathlib import Path

import xxhash

from flowmill.configs.errors import CorruptError
from flowmill.storage.backends.base import BLOCK, FileEntry

#: Bytes that are read and hashed at a time: small enough to stay in the CPU cache in between.
_PIECE = 256 << 10
REMEDY = "Run 'flowmill store verify' to find all damage and 'flowmill store repair' to regenerate it."


class Checksum:
    """Computes the checksums of a file while its content is written or read."""

    def __init__(self) -> None:
        self._block = xxhash.xxh3_128()
        self._blocks: list[bytes] = []
        self._size = 0

    def update(self, data: bytes | memoryview) -> None:
        """Append content."""
        view = memoryview(data)
        while len(view):
            piece = view[: BLOCK - self._size % BLOCK]
            self._block.update(piece)
            self._size += len(piece)
            view = view[len(piece) :]
            if self._size % BLOCK == 0:
                self._end_block()

    def entry(self, name: str) -> FileEntry:
        """Return the entry of the complete file."""
        if self._size % BLOCK or not self._blocks:
            self._end_block()
        if len(self._blocks) == 1:
            return FileEntry(name=name, size=self._size, xxh3=self._blocks[0].hex())
        whole = xxhash.xxh3_128_hexdigest(b"".join(self._blocks))
        return FileEntry(name=name, size=self._size, xxh3=whole, blocks=tuple(block.hex() for block in self._blocks))

    def _end_block(self) -> None:
        self._blocks.append(self._block.digest())
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
    with path.open("rb", buffering=0) as file:
        return _hash(_pieces(file))


def hash_data(data: bytes) -> str:
    """Return the xxh3-128 of bytes, hex; equal to ``hash_file`` of a file with them."""
    return xxhash.xxh3_128_hexdigest(data)


def _hash(pieces: Iterable[bytes | memoryview]) -> str:
    digest = xxhash.xxh3_128()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def _pieces(file: FileIO) -> Iterator[memoryview]:
    """Yield the content of a file in pieces, each overwritten by the next."""
    buffer = memoryview(bytearray(_PIECE))
    while size := file.readinto(buffer):
        yield buffer[:size]


def check_file(path: Path, entry: FileEntry, *, where: str) -> None:
    """Check one file against its record."""
    check_size(path.stat().st_size if path.is_file() else None, entry, where=where)
    with path.open("rb", buffering=0) as file:
        check_content(_pieces(file), entry, where=where)


def check_content(pieces: Iterable[bytes | memoryview], entry: FileEntry, *, where: str) -> None:
    """Check the whole content of a file, which comes in pieces."""
    if not entry.by_blocks:
        _check_digest(_hash(pieces), entry, where=where)
        return
    checksum = Checksum()
    for piece in pieces:
        checksum.update(piece)
    actual = checksum.entry(entry.name)
    if actual.size == entry.size:
        for number, digest in enumerate(actual.blocks):
            _check_block_digest(digest, number, entry, where=where)
    _check_digest(actual.xxh3, entry, where=where)


def _check_digest(actual: str, entry: FileEntry, *, where: str) -> None:
    if actual != entry.xxh3:
        raise CorruptError(f"{where} has checksum {actual[:12]}, its commit record says {entry.xxh3[:12]}. {REMEDY}")


def check_size(size: int | None, entry: FileEntry, *, where: str) -> None:
    """Check the size of a file; None stands for a missing file."""
    if size is None:
        raise CorruptError(f"{where} is missing; its commit record names it with {entry.size} bytes. {REMEDY}")
    if size != entry.size:
        raise CorruptError(f"{where} has {size} bytes, its commit record says {entry.size}. {REMEDY}")


def check_block(data: bytes | memoryview, number: int, entry: FileEntry, *, where: str) -> None:
    """Check one block of a file; a file of one block is checked as a whole."""
    if not entry.blocks:
        _check_digest(xxhash.xxh3_128_hexdigest(data), entry, where=where)
    elif entry.by_blocks:
        _check_block_digest(xxhash.xxh3_128_hexdigest(data), number, entry, where=where)
    else:
        _check_block_digest(xxhash.xxh3_64_hexdigest(data), number, entry, where=where)


def _check_block_digest(actual: str, number: int, entry: FileEntry, *, where: str) -> None:
    if actual != entry.blocks[number]:
        start = number * entry.block_size
        raise CorruptError(
            f"{where}, bytes {start} to {min(start + entry.block_size, entry.size)}, have checksum {actual[:16]}, "
            f"the commit record says {entry.blocks[number][:16]}. {REMEDY}"
        )


def check_range(offset: int, size: int, total: int, *, where: str) -> None:
    """Check that a range lies within a file."""
    if offset < 0 or size < 0 or offset + size > total:
        raise CorruptError(f"{where}: {size} bytes at {offset} lie outside the file of {total} bytes. {REMEDY}")
