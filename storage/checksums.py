"""Checksums of committed files: of the whole, and of every block, so that a range can be trusted on its own."""

from __future__ import annotations

from pathlib import Path

import xxhash

from configs.errors import CorruptError
from storage.roots.base import BLOCK, FileEntry

REMEDY = "Run 'flowmill store verify' to see what else is affected and 'flowmill store repair' to make it anew."


def describe_file(path: Path, name: str) -> FileEntry:
    """Return the entry of a finished file."""
    whole, blocks = xxhash.xxh3_128(), []
    with path.open("rb") as file:
        while chunk := file.read(BLOCK):
            whole.update(chunk)
            blocks.append(xxhash.xxh3_64_hexdigest(chunk))
    size = path.stat().st_size
    return FileEntry(name=name, size=size, xxh3=whole.hexdigest(), blocks=tuple(blocks) if len(blocks) > 1 else ())


def hash_file(path: Path) -> str:
    """Return the xxh3-128 of a file's content, hex."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(BLOCK):
            digest.update(chunk)
    return digest.hexdigest()


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
