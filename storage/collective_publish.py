"""Publishing one folder of files that several processes made, each its part of them.

Every process has a private folder. The first one's holds common files; those of one process lie in
``part_folder`` of its number. The first publishes its folder, then the others theirs below it, and only then does the
first write the one record that names all files: until it does, none of them counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from configs.errors import StoreError
from storage.backends.base import FileEntry, Root
from storage.checksums import describe_file
from storage.layout import part_folder


class ProcessGroup(Protocol):
    """The processes that work on one thing together, as one of them sees them."""

    @property
    def rank(self) -> int:
        """Number of this process."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes, in order; all must call it together."""
        ...


class SingleProcess:
    """A process without company."""

    rank = 0

    def gather(self, value: Any) -> list[Any]:
        """Return the value."""
        return [value]


def publish(
    root: Root,
    folder: Path,
    place: Callable[[Sequence[FileEntry]], str],
    company: ProcessGroup,
    known: Sequence[FileEntry] = (),
) -> tuple[FileEntry, ...]:
    """Publish a folder, and the parts other processes made; all must call this together.

    Args:
        root: where to.
        folder: this process's files.
        place: path for the files of all processes.
        company: the processes.
        known: entries of those files whose checksums were taken as they were written.

    Returns:
        All files, in the order of their names, once all are published.
    """
    files = tuple(
        sorted((file for each in company.gather(describe(folder, known)) for file in each), key=lambda f: f.name)
    )
    path, part = place(files), part_folder(company.rank)
    if company.rank == 0:
        root.publish(folder, path)
    company.gather(None)
    if company.rank and (folder / part).is_dir():
        root.publish(folder / part, f"{path}/{part}")
    company.gather(None)
    return files


def describe(folder: Path, known: Sequence[FileEntry] = ()) -> list[FileEntry]:
    """Return the entries of all files below a folder, sorted by name; files that are known are not read.

    Raises:
        StoreError: a known file has another size than the bytes written to it.
    """
    given = {entry.name: entry for entry in known}
    entries = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        entry = given.get(name) or describe_file(path, name)
        if (size := path.stat().st_size) != entry.size:
            raise StoreError(f"{path} has {size} bytes, but {entry.size} were written to it. Check the disk.")
        entries.append(entry)
    return entries
