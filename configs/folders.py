"""Lists the files of user folders, following symbolic links, and gives written files the permissions of a folder.

``flowmill.storage.backends`` lists folders of a store, where no link leads outside.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from flowmill.configs.errors import ConfigError

#: Maximum number of files and folders behind the links of one folder; a link to a whole disk is a mistake.
_MOST_LINKED = 100_000


def files_below(folder: Path) -> list[str]:
    """Return the sorted relative paths of all files of a folder, with ``/``.

    A folder that contains itself through a link is listed once. Unreadable entries and broken links are skipped.
    """
    return sorted(_files(folder))


def changed_ns(folder: Path, name: str) -> int:
    """Return the last change of a file below a folder, or of a link in its path, in nanoseconds since 1970.

    Raises:
        OSError: there is no such file.
    """
    path = folder / name
    links = [part for part in (path, *path.parents) if part.is_relative_to(folder) and part.is_symlink()]
    return max([path.stat().st_mtime_ns, *(part.lstat().st_mtime_ns for part in links)])


def led_to(folder: Path, name: str) -> str:
    """Return the target of a path below a folder that contains links; empty if it contains none."""
    plain, real = folder.resolve() / name, Path(os.path.realpath(folder / name))
    return "" if real == plain else str(real)


def _files(folder: Path) -> Iterator[str]:
    # For each folder still to be listed: its name, whether it is behind a link, and its parent folders.
    waiting, linked = [("", False, frozenset[tuple[int, int]]())], 0
    while waiting:
        prefix, by_link, above = waiting.pop()
        here = _number(folder / prefix)
        if here is None or here in above:
            continue
        for entry in _entries(folder / prefix):
            linked += by_link
            if linked > _MOST_LINKED:
                raise ConfigError(
                    f"'{folder}': links in it lead to more than {_MOST_LINKED} files, to '{prefix}' among others. Name "
                    "a folder whose links lead to its own files alone."
                )
            name = f"{prefix}{entry.name}"
            if Path(entry.path).is_dir():
                waiting.append((f"{name}/", by_link or entry.is_symlink(), above | {here}))
            elif Path(entry.path).is_file():
                yield name


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except PermissionError:
        return []


def _number(folder: Path) -> tuple[int, int] | None:
    """Return device and inode of a folder, which identify it under any name."""
    try:
        status = folder.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def share_files(folder: Path, above: Path) -> None:
    """Let everyone who may list the folder ``above`` read the files below ``folder``, but for targets of links.

    safetensors writes files that only their owner can read.
    """
    permissions = stat.S_IMODE(above.stat().st_mode) & 0o666
    for file in folder.rglob("*"):
        if file.is_file() and not file.is_symlink():
            file.chmod(permissions)
