"""Blobs of a store as files that Arrow reads in ranges."""

from __future__ import annotations

import io

import pyarrow as pa

from flowmill.storage.backends.base import Blob
from flowmill.storage.backends.mapped_file import MappedFile


def arrow_file(blob: Blob) -> pa.NativeFile:
    """Return a blob as a file for Arrow, which reads only the ranges it needs."""
    if isinstance(blob, MappedFile):
        return pa.BufferReader(pa.py_buffer(blob.read(0, blob.size)))
    return pa.PythonFile(_BlobFile(blob), mode="r")


class _BlobFile(io.RawIOBase):
    def __init__(self, blob: Blob) -> None:
        self._blob = blob
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._blob.size}[whence]
        self._position = start + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._blob.size - self._position)
        count = left if size is None or size < 0 else min(size, left)
        data = bytes(self._blob.read(self._position, count))
        self._position += count
        return data
