"""Names that are read from a store, a prompt file or an archive: they stay inside the folder they belong to."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

_DIGEST = re.compile(r"[0-9a-f]{8,64}")


def inside(path: str) -> str:
    """Return a path that leads to somewhere below its folder.

    Raises:
        ValueError: it is empty, absolute, or leads up, or holds a NUL or a backslash.
    """
    parts = path.split("/")
    if not path or "\0" in path or "\\" in path or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"{path!r} is no path below its folder")
    return path


def part(name: str) -> str:
    """Return a name of one file or folder.

    Raises:
        ValueError: it is none, or leads elsewhere.
    """
    if "/" in name:
        raise ValueError(f"{name!r} is no name, but a path")
    return inside(name)


def digest(text: str) -> str:
    """Return a digest.

    Raises:
        ValueError: it is something else than hexadecimal digits.
    """
    if not _DIGEST.fullmatch(text):
        raise ValueError(f"{text!r} is no digest")
    return text


def below(folder: Path, name: str) -> Path:
    """Return where a name leads to, below a folder; links are followed.

    Raises:
        ValueError: it leads out of the folder.
    """
    found = folder / inside(PurePosixPath(name).as_posix())
    if not found.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{name!r} is a link that leads out of '{folder}'")
    return found
