"""Files of given data on S3: listed by pattern, read as a whole into a temporary file, and in ranges.

Endpoint and credentials come from the usual AWS variables and files, as for a store.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from typing import IO, TYPE_CHECKING

import xxhash

from configs.errors import CorruptError, DataError, StoreError
from storage.backends.base import PART

if TYPE_CHECKING:
    from storage.backends.bucket import Bucket

_SCHEME = "s3://"


def is_remote(place: str) -> bool:
    """Return whether a file or folder is on S3."""
    return place.startswith(_SCHEME)


def remote_matches(pattern: str) -> list[str]:
    """Return the sorted files whose names match a pattern; the folder before it is as written."""
    folder, _, name = pattern.rpartition("/")
    with _reading(pattern):
        return [f"{folder}/{each}" for each in fnmatch.filter(_bucket(folder, os.getpid()).names(""), name)]


def remote_range(folder: str, name: str, start: int, stop: int) -> bytes:
    """Return a range of bytes of a file.

    Raises:
        DataError: it is not there, is shorter, or cannot be reached.
    """
    with _reading(f"{folder}/{name}"):
        return _bucket(folder, os.getpid()).get_range(name, start, stop)


@contextlib.contextmanager
def copied(file: str) -> Iterator[tuple[IO[bytes], str]]:
    """Give a temporary copy of a file, and its xxh3-128, as of a file on disk.

    Raises:
        DataError: it is not there, changes meanwhile, or cannot be reached.
    """
    folder, _, name = file.rpartition("/")
    checksum = xxhash.xxh3_128()
    with tempfile.TemporaryFile() as copy:
        with _reading(file):
            bucket = _bucket(folder, os.getpid())
            about = bucket.about(name)
            if about is None:
                raise DataError(f"'{file}' does not exist.")
            for start in range(0, about.size, PART):
                part = bucket.get_range(name, start, min(start + PART, about.size))
                checksum.update(part)
                copy.write(part)
            again = bucket.about(name)
            if again is None or again.version != about.version:
                raise DataError(f"'{file}' was changed while it was read. Give the same command again.")
        copy.seek(0)
        yield copy, checksum.hexdigest()


@lru_cache(maxsize=16)
def _bucket(folder: str, process: int) -> Bucket:
    # Imported late: it needs an extra.
    from storage.backends.bucket import Bucket

    return Bucket(folder.removeprefix(_SCHEME))


@contextlib.contextmanager
def _reading(file: str) -> Iterator[None]:
    try:
        yield
    except (OSError, StoreError, CorruptError) as error:
        raise DataError(f"'{file}' cannot be read: {error}") from None
