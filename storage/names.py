"""Checks that names from a store, a prompt file or an archive stay inside their folder."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Annotated

from pydantic import AfterValidator

_DIGEST = re.compile(r"[0-9a-f]{8,64}")


def inside(path: str) -> str:
    """Return a path after checking that it lies below its folder.

    Raises:
        ValueError: the path is empty or absolute, leads up, or holds a NUL or a backslash.
    """
    parts = path.split("/")
    if not path or "\0" in path or "\\" in path or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"{path!r} is no path below its folder")
    return path


def part(name: str) -> str:
    """Return a name after checking that it is that of a single file or folder.

    Raises:
        ValueError: the name is a path, or invalid.
    """
    if "/" in name:
        raise ValueError(f"{name!r} is no name, but a path")
    return inside(name)


def digest(text: str) -> str:
    """Return a digest after checking that it is hexadecimal.

    Raises:
        ValueError: the text is not 8 to 64 hexadecimal digits.
    """
    if not _DIGEST.fullmatch(text):
        raise ValueError(f"{text!r} is no digest")
    return text


def below(folder: Path, name: str) -> Path:
    """Return the path of a name below a folder, after checking its target with links resolved.

    Raises:
        ValueError: the target is outside the folder, or a link to itself.
    """
    path = folder / inside(PurePosixPath(name).as_posix())
    try:
        target = path.resolve()
    except RuntimeError as error:
        raise ValueError(f"{name!r} is a link that leads to itself ({error})") from None
    if not target.is_relative_to(folder.resolve()):
        raise ValueError(f"{name!r} is a link that leads out of '{folder}'")
    return path


#: Checked fields of stored records: a path below a folder, a name, a digest.
Inside = Annotated[str, AfterValidator(inside)]
Part = Annotated[str, AfterValidator(part)]
Digest = Annotated[str, AfterValidator(digest)]
