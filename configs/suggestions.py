"""The nearest valid name, or the nearest file that exists, for error messages."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from itertools import islice
from pathlib import Path

from flowmill.configs.user_directories import user_path

#: Names less alike than this are not suggested.
_CUTOFF = 0.5
#: Entries of a folder that are compared.
_ENTRIES = 5000


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """Return ``Did you mean 'x'? Valid: ...`` for an unknown name."""
    names = sorted(valid)
    near = nearest(name, names)
    hint = f"Did you mean {' or '.join(repr(n) for n in near)}? " if near else ""
    return f"{hint}Valid: {', '.join(names) or 'none'}."


def nearest(name: str, valid: Iterable[str], *, most: int = 2) -> list[str]:
    """Return the names most similar to an unknown one: misspelled, abbreviated, initials, a part; best first.

    Unless ``most`` is 1, up to four equally similar names are returned even if ``most`` is smaller.
    """
    scored = sorted(((_likeness(name, candidate), candidate) for candidate in valid), key=lambda item: (-item[0], item))
    best = scored[0][0] if scored else 0.0
    likely = [(score, candidate) for score, candidate in scored if score >= max(_CUTOFF, best - 0.15)]
    equal = sum(score == best for score, _ in likely)
    return [candidate for _, candidate in likely[: max(most, min(4, equal)) if most > 1 else 1]]


def near_path(path: str, folders: Sequence[Path], *, only_folders: bool = False) -> str | None:
    """Return the existing path most similar to a missing one, in the same notation; None if none is similar.

    Args:
        path: the missing path.
        folders: base folders of relative paths, in order.
        only_folders: whether the last part must be a folder.
    """
    for folder in dict.fromkeys(folders):
        folder_path = _walk(user_path(path), folder, only_folders=only_folders)
        if folder_path is not None:
            return str(folder_path)
    return None


def _likeness(name: str, candidate: str) -> float:
    """Return a similarity in 0..1; transposed letters and abbreviations count as small misspellings."""
    left, right = (text.casefold().replace("-", "_") for text in (name, candidate))
    if left == right:
        return 1.0
    ratio = SequenceMatcher(None, right, left).ratio()
    if len(left) < 2:
        return ratio
    if sorted(left) == sorted(right):
        return max(ratio, 0.9)
    words = right.split("_")
    initials = "".join(word[:1] for word in words)
    if left == initials:
        return max(ratio, 0.95)
    if right.startswith(left) or initials.endswith(left):
        return max(ratio, 0.9)
    if left in words:
        return max(ratio, 0.85)
    return max(ratio, 0.75) if _abbreviates(left, right) else ratio


def _abbreviates(short: str, long: str) -> bool:
    """Return whether the letters of ``short`` appear in ``long`` in order, beginning with its first."""
    if short[0] != long[:1]:
        return False
    rest = iter(long)
    return all(letter in rest for letter in short.replace("_", ""))


def _walk(path: Path, folder: Path, *, only_folders: bool) -> Path | None:
    """Follow a path from a folder, replacing each missing part by the most similar entry."""
    spelled = Path(path.anchor) if path.is_absolute() else Path()
    here = spelled if path.is_absolute() else folder
    parts = path.parts[1:] if path.is_absolute() else path.parts
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        if not (here / part).exists() or (last and only_folders and not (here / part).is_dir()):
            near = nearest(part, _entries(here, folders=only_folders or not last), most=1)
            if not near:
                return None
            part = near[0]
        here, spelled = here / part, spelled / part
    return spelled


def _entries(folder: Path, *, folders: bool) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in islice(entries, _ENTRIES) if entry.is_dir() or not folders]
    except OSError:
        return []
