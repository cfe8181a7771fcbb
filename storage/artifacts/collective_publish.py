"""Publishes one folder of files that several processes wrote together.

Every process has a private folder. Files of one process lie in ``part_folder`` of its rank; rank 0 also holds the
common files. Rank 0 publishes its folder first, then the other ranks publish theirs below it. Finally rank 0 writes
the one record that names all files; until then none of them is visible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from flowmill.configs.errors import StoreError
from flowmill.storage.backends.base import FileEntry, Root
from flowmill.storage.backends.checksums import describe_file
from flowmill.storage.layout import part_folder


class ProcessGroup(Protocol):
    """A group of processes that write files together, seen from one of them."""

    @property
    def rank(self) -> int:
        """Rank of this process."""

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes, in order of rank; all must call it together."""


class SingleProcess:
    """A group of one process."""

    rank = 0

    def gather(self, value: Any) -> list[Any]:
        """Return the value."""
        return [value]


def publish(
    root: Root,
    folder: Path,
    place: Callable[[Sequence[FileEntry]], str],
    company: ProcessGroup,
    hashed: Sequence[FileEntry] = (),
) -> tuple[FileEntry, ...]:
    """Publish a folder with the parts of all processes; all must call this together.

    Args:
        root: target root.
        folder: this process's files.
        place: returns the target path, from the files of all processes.
        hashed: entries of files whose checksums were computed while they were written.

    Returns:
        All files sorted by name, once all are published.
    """
    files = tuple(
        sorted((file for each in company.gather(describe(folder, hashed)) for file in each), key=lambda f: f.name)
    )
    path, part = place(files), part_folder(company.rank)
    if company.rank == 0:
        root.publish(folder, path)
    company.gather(None)
    if company.rank and (folder / part).is_dir():
        root.publish(folder / part, f"{path}/{part}")
    company.gather(None)
    return files


def describe(folder: Path, hashed: Sequence[FileEntry] = ()) -> list[FileEntry]:
    """Return the entries of all files below a folder, sorted by name; hashed files are not read."""
    by_name = {entry.name: entry for entry in hashed}
    entries = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        entry = by_name.get(name) or describe_file(path, name)
        if (size := path.stat().st_size) != entry.size:
            raise StoreError(f"{path} has {size} bytes, but {entry.size} were written to it. Check the disk.")
        entries.append(entry)
    return entries
