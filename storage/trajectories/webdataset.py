"""The default store: one Parquet table and one WebDataset tar per shard.

The tar holds for every sample its arrays (``<sample>.latents.npy`` and, where present, ``.means.npy``,
``.unconditional.npy``, ``.tokens.npy``, ``.token_mask.npy``), its media (``<sample>.png``, ``.webp`` or ``.mp4``) and
``<sample>.json``. Members start at multiples of 512 and npy payloads at multiples of 64 within them, so arrays are read
in place at the offset in the table, and ``tar``, ``webdataset`` and ``datasets`` can read the same file.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Iterator, Sequence
from functools import lru_cache
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from flowmill.configs.fingerprint import canonical_json
from flowmill.storage.artifacts.shard_files import Files
from flowmill.storage.backends.base import FileEntry
from flowmill.storage.backends.checksums import Checksum
from flowmill.storage.trajectories.arrays import array_entry
from flowmill.storage.trajectories.base import Sample, TrajectoryShard
from flowmill.storage.trajectories.media import DEFAULT_MEDIA, MediaFormat
from flowmill.storage.trajectories.schema import SAMPLES, read_table, write_table

TABLE = "samples.parquet"
TAR = "samples.tar"
#: Size of the caches of headers and descriptions, which repeat among samples of one kind.
_KNOWN = 256
#: Limits on bytes and parts per write: by the CPU cache, which holds the data after checksums, and by system calls.
_GATHERED, _PARTS = 1 << 20, 512
#: Maximum bytes of a member whose parts are copied into one buffer.
_SMALL = 1 << 14

_EMPTY = tarfile.TarInfo().tobuf(tarfile.USTAR_FORMAT)
#: POSIX ustar: the sum is eight bytes from 148, of which six are octal digits; sizes have eleven of them from 124.
_EMPTY_SUM, _LARGEST = int(_EMPTY[148:154], 8), 8**11


class WebDatasetStore:
    """One ``samples.parquet`` and one ``samples.tar`` per shard."""

    def writer(self, folder: Path, media: MediaFormat = DEFAULT_MEDIA) -> WebDatasetWriter:
        """Begin a shard."""
        return WebDatasetWriter(folder, media)

    def open(self, files: Files) -> TrajectoryShard:
        """Open a shard."""
        where = f"{files.where}/{TAR}"
        return TrajectoryShard(lambda: read_table(files, TABLE, SAMPLES), lambda: files.blob(TAR), where)


class WebDatasetWriter:
    """Writes samples to the tar as they arrive, and the table with payload offsets at the end."""

    def __init__(self, folder: Path, media: MediaFormat) -> None:
        self._folder = folder
        self._media = media
        self._rows: dict[str, list[Any]] = {name: [] for name in SAMPLES.names}
        self._tar = _TarWriter(folder / TAR)

    def add(self, samples: Sequence[Sample]) -> None:
        """Append samples to the tar."""
        for sample in samples:
            for name, value in _write_sample(self._tar, sample, self._media).items():
                self._rows[name].append(value)
        self._tar.flush()

    def end(self) -> Sequence[FileEntry]:
        """End the tar and write the table."""
        entry = self._tar.end()
        write_table(self._folder / TABLE, self._rows, SAMPLES)
        return [entry]


class _TarWriter:
    """Appends members to a tar without copying them; the bytes are those ``tarfile`` would write.

    Parts are gathered, and checksums taken just before they are written.
    """

    def __init__(self, path: Path) -> None:
        path.touch(exist_ok=False)
        self._path = path
        self._checksum = Checksum()
        self._position = 0
        self._waiting: list[memoryview] = []

    def add(self, name: str, *parts: bytes | memoryview) -> int:
        """Append a member that consists of parts, without times or owners; return the offset of its data."""
        size = sum(map(len, parts))
        header = _header(name, size)
        start = self._position + len(header)
        self._append(header, *parts, bytes(-size % tarfile.BLOCKSIZE))
        return start

    def flush(self) -> None:
        """Write the appended bytes."""
        with self._path.open("ab", buffering=0) as file:
            self._write(file)

    def end(self) -> FileEntry:
        """Write the end of the archive; return its entry."""
        end = 2 * tarfile.BLOCKSIZE
        self._append(bytes(end + -(self._position + end) % tarfile.RECORDSIZE))
        self.flush()
        return self._checksum.entry(self._path.name)

    def _append(self, *parts: bytes | memoryview) -> None:
        size = sum(map(len, parts))
        self._position += size
        # Each of many small parts would cost more than its copy.
        joined = (b"".join(parts),) if size <= _SMALL else parts
        self._waiting += [memoryview(part) for part in joined if len(part)]

    def _write(self, file: FileIO) -> None:
        for some in _gathered(self._waiting):
            for part in some:
                self._checksum.update(part)
            left = list(some)
            while left:
                written = os.writev(file.fileno(), left)
                while left and written >= len(left[0]):
                    written -= len(left.pop(0))
                if left:
                    left[0] = left[0][written:]
        self._waiting.clear()


def _header(name: str, size: int) -> bytes:
    """Return the header of a member, as ``tarfile`` makes it."""
    encoded = name.encode()
    if len(encoded) > tarfile.LENGTH_NAME or not name.isascii() or size >= _LARGEST:
        info = tarfile.TarInfo(name)
        info.size, info.mode = size, 0o644
        return info.tobuf(tarfile.USTAR_FORMAT)
    octal = b"%011o" % size
    # The sum of all bytes, its own field counted as spaces, is that of the empty member plus the differences.
    total = _EMPTY_SUM + sum(encoded) + sum(octal) - 11 * ord("0")
    return b"".join((encoded.ljust(100, b"\0"), _EMPTY[100:124], octal, _EMPTY[135:148], b"%06o" % total, _EMPTY[154:]))


def _gathered(parts: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Yield parts in lists that respect the limits on bytes and parts per write; large parts are split."""
    some: list[memoryview] = []
    room = _GATHERED
    for part in parts:
        rest = part
        while len(rest) > room:
            yield [*some, rest[:room]]
            rest = rest[room:]
            some, room = [], _GATHERED
        some.append(rest)
        room -= len(rest)
        if room == 0 or len(some) == _PARTS:
            yield some
            some, room = [], _GATHERED
    if some:
        yield some


def _write_sample(tar: _TarWriter, sample: Sample, media: MediaFormat) -> dict[str, Any]:
    columns = sample.columns()
    arrays = [
        array_entry(name, array, _add_array(tar, f"{sample.sample_id}.{name}.npy", array))
        for name, array in sample.arrays().items()
    ]
    place = {"media_format": "", "media_offset": -1, "media_size": 0}
    if sample.media is not None:
        form, encoded = media.choose(sample.media), media.encode(sample.media, sample.sound)
        offset = tar.add(f"{sample.sample_id}.{form}", encoded)
        place = {"media_format": form, "media_offset": offset, "media_size": len(encoded)}
    tar.add(f"{sample.sample_id}.json", _described(sample.prompt, sample.prompt_id, columns["metadata"]))
    return {**columns, "arrays": arrays, **place}


@lru_cache(_KNOWN)
def _described(prompt: str, prompt_id: str, metadata: str) -> bytes:
    """Return the JSON of a sample in the tar, cached, as samples of a group share it."""
    return canonical_json({"prompt": prompt, "prompt_id": prompt_id, "metadata": json.loads(metadata)}).encode()


def _add_array(tar: _TarWriter, name: str, array: np.ndarray) -> int:
    """Append a contiguous array as .npy; return the offset of its raw data."""
    prefix = _npy_header(array.dtype, array.shape)
    return tar.add(name, prefix, array.data.cast("B") if array.size else b"") + len(prefix)


@lru_cache(_KNOWN)
def _npy_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Return the .npy header of a row-major array."""
    header = io.BytesIO()
    fields = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, fields)
    return header.getvalue()
