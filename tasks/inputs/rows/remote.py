"""Files of rows on S3: listed, read as a whole into a temporary file, and in ranges.

Endpoint and credentials come from the usual AWS variables and files, as for a store.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

from flowmill.configs.errors import CorruptError, DataError, StoreError
from flowmill.storage.backends.base import PART

if TYPE_CHECKING:
    from flowmill.storage.backends.bucket import Bucket

_SCHEME = "s3://"


def is_remote(place: str) -> bool:
    """Return whether a file or folder is on S3."""
    return place.startswith(_SCHEME)


def remote_sizes(folder: str) -> dict[str, int]:
    """Return the bytes of all files below a folder by name."""
    with _reading(folder):
        return _bucket(folder.rstrip("/"), os.getpid()).sizes("")


def remote_matches(pattern: str) -> list[str]:
    """Return the sorted files whose names match a pattern; the folder before it is as written."""
    folder, _, name = pattern.rpartition("/")
    with _reading(pattern):
        return [f"{folder}/{each}" for each in fnmatch.filter(_bucket(folder, os.getpid()).names(""), name)]


def remote_data(file: str) -> bytes | None:
    """Return the content of a file, None if it does not exist."""
    folder, _, name = file.rpartition("/")
    with _reading(file):
        return _bucket(folder, os.getpid()).get(name)


def remote_range(folder: str, name: str, start: int, stop: int) -> bytes:
    """Return a range of bytes of a file."""
    with _reading(f"{folder}/{name}"):
        return _bucket(folder, os.getpid()).get_range(name, start, stop)


@contextlib.contextmanager
def copied(file: str) -> Iterator[str]:
    """Give the path of a temporary copy of a file."""
    folder, _, name = file.rpartition("/")
    with tempfile.NamedTemporaryFile(prefix="flowmill-") as copy:
        with _reading(file):
            bucket = _bucket(folder, os.getpid())
            entry = bucket.metadata(name)
            if entry is None:
                raise DataError(f"'{file}' does not exist.")
            for start in range(0, entry.size, PART):
                copy.write(bucket.get_range(name, start, min(start + PART, entry.size)))
            again = bucket.metadata(name)
            if again is None or again.version != entry.version:
                raise DataError(f"'{file}' was changed while it was read. Give the same command again.")
        copy.flush()
        yield copy.name


@lru_cache(maxsize=16)
def _bucket(folder: str, process: int) -> Bucket:
    # Imported late: it needs an extra.
    from flowmill.storage.backends.bucket import Bucket

    return Bucket(folder.removeprefix(_SCHEME))


@contextlib.contextmanager
def _reading(file: str) -> Iterator[None]:
    try:
        yield
    except (OSError, StoreError, CorruptError) as error:
        raise DataError(f"'{file}' cannot be read: {error}") from None
