"""A store root on a prefix of an S3 bucket.

Large files are published under names that contain their digest. They become visible once a small record names them,
which is put on the condition that it does not exist.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

from flowmill.configs.errors import CorruptError
from flowmill.configs.fingerprint import fingerprint
from flowmill.configs.schema import StoreSection
from flowmill.configs.user_directories import user_cache, user_path
from flowmill.storage.backends.base import PART, Blob, FileEntry, Item, Result
from flowmill.storage.backends.bucket import Bucket
from flowmill.storage.backends.cache import Cache
from flowmill.storage.backends.checksums import check_block, check_content, check_file, check_range, check_size
from flowmill.storage.backends.lease import Lease, holder_of
from flowmill.storage.backends.mapped_file import MappedFile
from flowmill.storage.backends.memory_cache import MemoryCache
from flowmill.storage.backends.process_tags import tag

_PIECE = 4 * PART
#: Concurrent uploads of files of a shard.
_TOGETHER = 4
#: Runs or artifacts whose requests are concurrent.
_ITEMS = 16
_STALE_UPLOAD_S = 24 * 3600.0

#: Maximum bytes of cached records, and of one record.
_RECORDS, _RECORD = 64_000_000, 4_000_000


class S3Backend:
    """Objects below ``s3://bucket/prefix``, with local copies in a cache."""

    def __init__(self, path: str, section: StoreSection) -> None:
        self._bucket = Bucket(path)
        self.uri = self._bucket.uri
        # Commands without a config have the variable alone.
        self._single_writer = section.single_writer or os.environ.get("FLOWMILL_SINGLE_WRITER", "") not in ("", "0")
        top = user_path(section.cache) if section.cache else user_cache()
        name = fingerprint([self.uri, os.environ.get("AWS_ENDPOINT_URL", "")])[:16]
        self._cache = Cache(top / name, section.cache_size)
        self.disk = str(self._cache.folder)
        self._records = MemoryCache(limit=_RECORDS, largest=_RECORD)
        self._checked: set[str] = set()
        self._leases: list[Lease] = []

    def create(self, path: str, data: bytes) -> bool:
        """Put a small object if it does not exist; False when it does."""
        self._check_leases()
        if self._records.get(path) is not None or not self._create(path, data):
            return False
        self._records.add(path, data)
        return True

    def _check_leases(self) -> None:
        for lease in self._leases:
            lease.check()

    def _create(self, path: str, data: bytes) -> bool:
        if not self._single_writer:
            return self._bucket.put_new(path, data)
        if self._bucket.get(path) is not None:
            return False
        self._bucket.put(path, data)
        return True

    def publish(self, folder: Path, path: str) -> None:
        """Upload every file. Existing objects are equal, as the name contains the digest, or damaged.

        The files stay in the cache, where later stages read them.
        """
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        with ThreadPoolExecutor(_TOGETHER, thread_name_prefix="upload") as pool:
            names = [file.relative_to(folder).as_posix() for file in files]
            for _ in pool.map(self._bucket.upload, files, (f"{path}/{name}" for name in names)):
                pass
        for file, name in zip(files, names, strict=True):
            self._adopt(file, path, name)

    def read(self, path: str) -> bytes | None:
        """Return the bytes of a small object, or None when it does not exist; cached if it was read before."""
        data = self._records.get(path)
        if data is None:
            data = self._bucket.get(path)
            self._records.add(path, data)
        return data

    def read_many(self, paths: list[str]) -> list[bytes | None]:
        """Return the bytes of several small objects, fetched concurrently; cached if they were read before."""
        records = {path: self._records.get(path) for path in paths}
        missing = [path for path, data in records.items() if data is None]
        for path, data in zip(missing, self._bucket.get_many(missing), strict=True):
            self._records.add(path, data)
            records[path] = data
        return [records[path] for path in paths]

    def map(self, function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """Return the results of a function for each item, several at a time."""
        with ThreadPoolExecutor(_ITEMS, thread_name_prefix="item") as pool:
            return list(pool.map(function, items))

    def list(self, path: str) -> list[str]:
        """Return the sorted names directly below ``path``."""
        return self._bucket.names(path)

    def files(self, path: str) -> Mapping[str, int]:
        """Return the size of every object below ``path`` by its path below it."""
        return self._bucket.sizes(path)

    def fetch(self, path: str, entry: FileEntry) -> Path:
        """Download a committed file into the cache, where it stays while in use, and check it once."""
        where = f"{path}/{entry.name}"
        folder, target = self._cache.folder / "files" / path, self._local(path, entry.name)
        if where in self._checked and target.exists():
            return target
        self._cache.hold(folder)
        if not target.exists() or target.stat().st_size != entry.size:
            self._download(where, entry, target)
        try:
            check_file(target, entry, where=where)
        except CorruptError:
            # The cached copy may be damaged; a second error means that the object is.
            self._download(where, entry, target)
            check_file(target, entry, where=where)
        with contextlib.suppress(OSError):
            os.utime(target)
        self._checked.add(where)
        return target

    def check(self, path: str, entry: FileEntry) -> None:
        """Download a committed file in pieces and compare every byte, without caching."""
        where = f"{path}/{entry.name}"
        try:
            check_content(self._pieces(where, entry), entry, where=where)
        except FileNotFoundError:
            check_size(None, entry, where=where)

    def blob(self, path: str, entry: FileEntry) -> Blob:
        """Open a committed file for range requests; large files without block checksums (version 1) are downloaded."""
        if not entry.blocks and entry.size > PART:
            return MappedFile(self.fetch(path, entry), where=f"{path}/{entry.name}")
        if f"{path}/{entry.name}" in self._checked:
            with contextlib.suppress(FileNotFoundError):
                # A mapped file stays readable after the cache removes it.
                return MappedFile(self._local(path, entry.name), where=f"{path}/{entry.name}")
        return RemoteFile(self._bucket, f"{path}/{entry.name}", entry, self._cache)

    def move(self, path: str, target: str) -> None:
        """Copy an object or folder, then remove the original, as long as this process holds its leases."""
        self._check_leases()
        # A folder without files may be a marker, an object of another name.
        names = [f"/{name}" for name in self.files(path)] or [""] * (self._bucket.metadata(path) is not None)
        for name in names:
            self._bucket.copy(path + name, target + name)
        self.remove(path)

    def remove(self, path: str) -> None:
        """Remove an object or everything below a folder but the leases of this process, as long as it holds them."""
        self._remove(path, lambda name: True)

    def remove_below(self, path: str, chosen: Callable[[str], bool]) -> None:
        """Remove the chosen ones of the objects and folders directly below a folder, a thousand objects per request."""
        self._remove(path, lambda name: chosen(name.removeprefix(f"{path}/").partition("/")[0]))

    def _remove(self, path: str, chosen: Callable[[str], bool]) -> None:
        self._check_leases()
        leases = {lease.path for lease in self._leases}
        self._bucket.delete(path, lambda name: name not in leases and chosen(name))
        self._records.forget(path)
        self._checked -= {where for where in list(self._checked) if where == path or where.startswith(f"{path}/")}

    def staging(self) -> contextlib.AbstractContextManager[Path]:
        """Provide a private local folder; removed afterwards."""
        return self._cache.staging.make()

    def sweep(self) -> int:
        """Remove leftovers of killed processes: local staging folders, and multipart uploads older than a day."""
        return self._cache.staging.sweep() + self._bucket.abort_uploads(_STALE_UPLOAD_S)

    @contextlib.contextmanager
    def lock(self, path: str, label: str) -> Iterator[None]:
        """Hold a lease: an object that names its holder and is renewed while the holder lives.

        A lease is taken over if its process on this machine is dead, or if it was not renewed for a minute of the
        server's clock. Only its holder renews it; a holder that lost it, or could not renew it for a minute, commits
        and removes nothing more. The lease avoids duplicate work; correctness relies on conditional commits alone.
        """
        lease = Lease(self._bucket, path, label, self._create)
        lease.take()
        self._leases.append(lease)
        try:
            yield
        finally:
            self._leases.remove(lease)
            lease.give_back()

    def locked(self, path: str) -> bool:
        """Return whether a process that may be alive holds a lease."""
        return holder_of(self._bucket, path, self._bucket.metadata(path)) is not None

    def _local(self, path: str, name: str) -> Path:
        return self._cache.folder / "files" / path / name

    def _adopt(self, file: Path, path: str, name: str) -> None:
        """Keep a published file in the cache as checked, as its checksums were computed from its bytes."""
        target = self._local(path, name)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)
            os.link(file, target)
        except OSError:
            return  # written outside the cache's staging folder: it is downloaded when needed
        self._cache.added(file.stat().st_size)
        self._checked.add(f"{path}/{name}")

    def _pieces(self, where: str, entry: FileEntry) -> Iterator[bytes]:
        for start in range(0, entry.size, _PIECE):
            yield self._bucket.get_range(where, start, min(start + _PIECE, entry.size))

    def _download(self, where: str, entry: FileEntry, target: Path) -> None:
        temporary = self._cache.staging.folder / tag()
        with self._cache.writing():
            target.parent.mkdir(parents=True, exist_ok=True)
            file = temporary.open("xb", buffering=0)
        try:
            with file:
                for piece in self._pieces(where, entry):
                    with self._cache.writing():
                        _write(file, piece)
            with self._cache.writing():
                temporary.rename(target)
        except FileNotFoundError:
            check_size(None, entry, where=where)
        finally:
            temporary.unlink(missing_ok=True)
        self._cache.added(entry.size)


def _write(file: IO[bytes], data: bytes) -> None:
    """Write all data to an unbuffered file; a buffered one would only raise errors on close."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


class RemoteFile:
    """A committed object read by range requests of 4 MiB parts, each checked and cached separately."""

    def __init__(self, bucket: Bucket, path: str, entry: FileEntry, cache: Cache) -> None:
        self.size = entry.size
        self._bucket = bucket
        self._path = path
        self._entry = entry
        self._cache = cache

    def read(self, offset: int, size: int) -> memoryview:
        """Return the bytes of a range."""
        check_range(offset, size, self.size, where=self._path)
        if size == 0:
            return memoryview(b"")
        first, last = offset // PART, (offset + size - 1) // PART
        start = offset - first * PART
        parts = [memoryview(self._part(number)) for number in range(first, last + 1)]
        joined = parts[0] if len(parts) == 1 else memoryview(b"".join(parts))
        return joined[start : start + size]

    def _part(self, number: int) -> bytes:
        key = f"{self._entry.xxh3}-{number}"
        data = self._cache.part(key)
        if data is not None:
            try:
                self._check(data, number)
            except CorruptError:
                self._cache.drop_part(key)  # the cached copy is damaged
            else:
                return data
        try:
            if self.size > PART:
                data = self._bucket.get_range(self._path, number * PART, min((number + 1) * PART, self.size))
            else:
                # The client for whole objects takes a tenth of the CPU time.
                (data,) = self._bucket.get_many([self._path])
        except FileNotFoundError:
            data = None
        if data is None:
            check_size(None, self._entry, where=self._path)
            raise FileNotFoundError(self._path)
        self._check(data, number)
        self._cache.put_part(key, data)
        return data

    def _check(self, data: bytes, number: int) -> None:
        view, step, begin = memoryview(data), self._entry.block_size, number * PART
        size = min(PART, self.size - begin)
        for start in range(0, size, step):
            # The last block takes all remaining bytes, so that a response of the wrong size is detected.
            block = view[start : start + step] if start + step < size else view[start:]
            check_block(block, (begin + start) // step, self._entry, where=self._path)
