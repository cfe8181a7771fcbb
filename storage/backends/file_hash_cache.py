"""Checksums of files outside any store, cached per user by path, size, modification time and links.

A changed file of the same size with a reset modification time goes undetected; ``deep`` reads everything again.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import xxhash

from flowmill.configs.folders import led_to
from flowmill.configs.user_directories import user_cache
from flowmill.storage.backends.checksums import hash_file

#: Within this time a file may change again without a new modification time; hashes of younger files are not cached.
YOUNG_NS = 2_000_000_000

_Entries = dict[str, list[int | str]]
_unsaved: dict[Path, _Entries] = {}


def file_hashes(folder: Path, names: Sequence[str], *, deep: bool = False) -> dict[str, str]:
    """Return the xxh3-128 of files by name.

    Args:
        names: their paths below it.
        deep: read them again, ignoring the cache.
    """
    cached, requested = _load(folder), set(names)
    hashes: dict[str, str] = {}
    # Hashes of other files of the folder stay: requests may name single files.
    entries = {name: entry for name, entry in cached.items() if name not in requested and (folder / name).exists()}
    for name in names:
        now = time.time_ns()
        stat = (folder / name).stat()
        # A link may change its target while no file changes.
        place = [each for each in (led_to(folder, name),) if each]
        previous = None if deep else cached.get(name)
        fresh = previous is not None and [*previous[:2], *previous[3:]] == [stat.st_size, stat.st_mtime_ns, *place]
        hashes[name] = str(previous[2]) if previous is not None and fresh else hash_file(folder / name)
        if stat.st_mtime_ns < now - YOUNG_NS:
            entries[name] = [stat.st_size, stat.st_mtime_ns, hashes[name], *place]
    if entries != cached:
        _save(folder, entries)
    return hashes


def _load(folder: Path) -> _Entries:
    if folder in _unsaved:
        return _unsaved[folder]
    try:
        data = json.loads(cache_place(folder).read_text())
        return {
            str(name): [int(size), int(mtime), str(xxh3), *map(str, place)]
            for name, (size, mtime, xxh3, *place) in data["files"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        # A missing or unreadable cache only costs a pass over the files.
        return {}


def _save(folder: Path, entries: _Entries) -> None:
    place = cache_place(folder)
    temporary = place.with_suffix(f".{os.getpid()}.tmp")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps({"folder": str(folder.resolve()), "files": entries}))
        temporary.replace(place)
        _unsaved.pop(folder, None)
    except OSError:
        # Without a writable home each process reads the files once.
        _unsaved[folder] = entries


def cache_place(folder: Path) -> Path:
    """Return the file that caches hashes of a folder."""
    return user_cache() / "hashes" / f"{xxhash.xxh3_64_hexdigest(str(folder.resolve()).encode())}.json"
