"""Checksums of ranges of a file outside any store, such as the members of a tar, cached like those of files.

The cache is a sequence that is read along with the file, so that memory does not grow with the number of ranges.
"""

from __future__ import annotations

import contextlib
import io
import os
import struct
import time
from pathlib import Path
from typing import IO

import xxhash

from flowmill.storage.backends.file_hash_cache import YOUNG_NS, cache_place

#: Size and modification time of the file; offset, size and xxh3-128 of a range; bytes that are read at a time.
_HEADER, _RANGE, _PIECE = struct.Struct("<qq"), struct.Struct("<qq16s"), 1 << 20


class RangeHashes:
    """Returns the xxh3-128 of ranges, most quickly those of the last time in the same order."""

    def __init__(self, file: IO[bytes], path: Path | None) -> None:
        """Bind to an open file, and to its path if hashes are cached."""
        self._file, self._stack, self._right = file, contextlib.ExitStack(), 0
        self._old: IO[bytes] = io.BytesIO()
        self._new: IO[bytes] | None = None
        stat = None if path is None else path.stat()
        young = stat is None or stat.st_mtime_ns >= time.time_ns() - YOUNG_NS
        self._place = None if path is None or young else cache_place(path).with_suffix(".ranges")
        self._header = b"" if stat is None else _HEADER.pack(stat.st_size, stat.st_mtime_ns)
        if self._place is not None and self._place.is_file():
            old = self._stack.enter_context(self._place.open("rb"))
            self._old = old if old.read(_HEADER.size) == self._header else self._old

    def __enter__(self) -> RangeHashes:
        return self

    def __exit__(self, *error: object) -> None:
        # Without a writable home everything works, but slower.
        with contextlib.suppress(OSError):
            self._stack.close()
            if self._new is not None and self._place is not None:
                Path(self._new.name).replace(self._place)

    def of(self, offset: int, size: int) -> str:
        """Return the hash of a range; raise OSError if the file ends before."""
        record = b"" if self._new is not None else self._old.read(_RANGE.size)
        if len(record) == _RANGE.size and _RANGE.unpack(record)[:2] == (offset, size):
            self._right += 1
        else:
            record = _RANGE.pack(offset, size, self._hash(offset, size))
            self._keep(record)
        return bytes(_RANGE.unpack(record)[2]).hex()

    def _hash(self, offset: int, size: int) -> bytes:
        digest, left = xxhash.xxh3_128(), size
        self._file.seek(offset)
        while left:
            piece = self._file.read(min(left, _PIECE))
            if not piece:
                raise OSError(f"the file ends {left} bytes before the end of a member")
            digest.update(piece)
            left -= len(piece)
        return digest.digest()

    def _keep(self, record: bytes) -> None:
        """Write a record after those of the old sequence that were right."""
        if self._place is None:
            return
        try:
            if self._new is None:
                self._place.parent.mkdir(parents=True, exist_ok=True)
                temporary = self._place.with_suffix(f".{os.getpid()}.tmp")
                self._new = self._stack.enter_context(temporary.open("wb"))
                self._new.write(self._header)
                self._old.seek(_HEADER.size)
                for _ in range(self._right):
                    self._new.write(self._old.read(_RANGE.size))
            self._new.write(record)
        except OSError:
            self._place = None
