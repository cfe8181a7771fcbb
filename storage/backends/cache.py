"""The local cache of a remote root: whole small files, and checked parts of large ones, within a size limit.

Any file in it can be removed at any time, except for those of folders in use, which processes lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from flowmill.configs.errors import StoreError
from flowmill.storage.backends.base import PART, Staging
from flowmill.storage.backends.memory_cache import MemoryCache
from flowmill.storage.backends.process_tags import tag

_IN_USE = ".in-use"
#: Parts in memory.
_RECENT = 16
#: Maximum number of locked folders; each takes an open file.
_LOCKED = 64


class Cache:
    """Files below a folder with a size limit; the least recently used files are removed first."""

    def __init__(self, folder: Path, limit: int) -> None:
        """Bind to a folder, which is created on the first write, as small objects are read without it.

        Args:
            folder: the folder of the cache.
            limit: maximum bytes.
        """
        self.folder = folder
        self.limit = limit
        self._staging: Staging | None = None
        self._locked: OrderedDict[Path, IO[bytes]] = OrderedDict()
        self._recent = MemoryCache(limit=_RECENT * PART, largest=PART)
        self._size: int | None = None
        self._lock = threading.Lock()

    @property
    def staging(self) -> Staging:
        """Folder of files in progress."""
        if self._staging is None:
            with self.writing():
                self._staging = Staging(self.folder)
        return self._staging

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Convert write errors inside the context to one that names the folder and the settings for another."""
        try:
            yield
        except OSError as error:
            raise StoreError(
                f"The cache of the store, '{self.folder}', cannot be written: {error.strerror or error}. Committed "
                "data stays: make room there, or set store.cache or XDG_CACHE_HOME to another folder."
            ) from None

    def hold(self, folder: Path) -> None:
        """Keep the files of a folder until this process has locked many others, or ends."""
        with self._lock, self.writing():
            if folder in self._locked:
                self._locked.move_to_end(folder)
                return
            if len(self._locked) >= _LOCKED:
                self._locked.popitem(last=False)[1].close()
            folder.mkdir(parents=True, exist_ok=True)
            file = (folder / _IN_USE).open("ab")
            fcntl.flock(file, fcntl.LOCK_SH)
            self._locked[folder] = file

    def part(self, key: str) -> bytes | None:
        """Return a part of a file, or None."""
        recent = self._recent.get(key)
        if recent is not None:
            return recent
        path = self._part_path(key)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        self._recent.add(key, data)
        return data

    def put_part(self, key: str, data: bytes) -> None:
        """Cache a part of a file atomically; if it cannot be written, it is fetched again later."""
        self._recent.add(key, data)
        path = self._part_path(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self.staging.folder / tag()
            try:
                temporary.write_bytes(data)
                temporary.rename(path)
            finally:
                temporary.unlink(missing_ok=True)
        except (OSError, StoreError):
            return
        self.added(len(data))

    def drop_part(self, key: str) -> None:
        """Drop a damaged part."""
        self._recent.forget(key)
        with contextlib.suppress(OSError):
            self._part_path(key).unlink(missing_ok=True)

    def added(self, count: int) -> None:
        """Account for new bytes, and remove the oldest files when the limit is exceeded."""
        with self._lock:
            if self._size is not None:
                self._size += count
            if self._size is None or self._size > self.limit:
                self._size = self._trim()

    def _part_path(self, key: str) -> Path:
        return self.folder / "blocks" / key[:2] / key

    def _trim(self) -> int:
        """Remove the least recently used files until a tenth of the limit is free; return the bytes that stay."""
        files = []
        for path in self.folder.rglob("*"):
            try:
                if path.is_file() and path.name != _IN_USE:
                    status = path.stat()
                    files.append((status.st_mtime, status.st_size, path))
            except FileNotFoundError:
                continue  # another process removed it
        total = sum(size for _, size, _ in files)
        if total <= self.limit:
            return total
        holders = _Holders(self.folder)
        for _, size, path in sorted(files):
            if total <= self.limit * 9 // 10:
                break
            if self.staging.folder in path.parents or holders.holds(path):
                continue
            try:
                path.unlink(missing_ok=True)
            except OSError:
                continue  # such as files of another user
            total -= size
        return total


class _Holders:
    """Looks up which folders of a cache processes hold."""

    def __init__(self, top: Path) -> None:
        self._top = top
        self._states: dict[Path, bool] = {}

    def holds(self, path: Path) -> bool:
        """Return whether a folder around ``path`` is locked."""
        return any(self._is_locked(folder) for folder in path.parents if self._top in folder.parents)

    def _is_locked(self, folder: Path) -> bool:
        if folder not in self._states:
            self._states[folder] = _locked(folder / _IN_USE)
        return self._states[folder]


def _locked(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
