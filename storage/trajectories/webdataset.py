"""The default store: one Parquet table beside one WebDataset tar.

The tar holds for every sample its arrays (``<sample>.latents.npy`` and, where present, ``.means.npy``,
``.unconditional.npy``, ``.tokens.npy``, ``.token_mask.npy``), its media (``<sample>.png``, ``.webp`` or ``.mp4``) and
``<sample>.json``. Members start at multiples of 512 and npy payloads at multiples of 64 within them, so arrays are read
as they lie at the offset the table gives, and any ``tar``, ``webdataset`` or ``datasets`` user can read the same file.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from configs.fingerprint import canonical_json
from storage.files import Files
from storage.media import DEFAULT_MEDIA, MediaFormat
from storage.schema import SAMPLES, read_table, write_table
from storage.trajectories.base import Sample, TrajectoryShard, array_entry

TABLE = "samples.parquet"
TAR = "samples.tar"


class WebDatasetStore:
    """One ``samples.parquet`` and one ``samples.tar`` per shard."""

    def write(self, folder: Path, samples: Sequence[Sample], media: MediaFormat = DEFAULT_MEDIA) -> None:
        """Write the tar, then the table with the payload offsets."""
        rows: dict[str, list[Any]] = {name: [] for name in SAMPLES.names}
        with (folder / TAR).open("wb", buffering=0) as file:
            tar = _TarWriter(file)
            for sample in samples:
                for name, value in _write_sample(tar, sample, media).items():
                    rows[name].append(value)
            tar.end()
        write_table(folder / TABLE, rows, SAMPLES)

    def open(self, files: Files) -> TrajectoryShard:
        """Open a shard.

        Raises:
            CorruptError: the table is not a samples table.
        """
        return TrajectoryShard(read_table(files, TABLE, SAMPLES), lambda: files.blob(TAR), f"{files.where}/{TAR}")


class _TarWriter:
    """Appends members to a tar without copying them; the bytes are those ``tarfile`` would write."""

    def __init__(self, file: FileIO) -> None:
        self._file = file
        self._position = 0

    def add(self, name: str, *parts: bytes | memoryview) -> int:
        """Append a member, without times or owners, made of parts; return where its data starts."""
        info = tarfile.TarInfo(name)
        info.size = sum(len(part) for part in parts)
        info.mode = 0o644
        header = info.tobuf(tarfile.USTAR_FORMAT)
        start = self._position + len(header)
        self._write(header, *parts, bytes(-info.size % tarfile.BLOCKSIZE))
        return start

    def end(self) -> None:
        """Write the end of the archive."""
        end = 2 * tarfile.BLOCKSIZE
        self._write(bytes(end + -(self._position + end) % tarfile.RECORDSIZE))

    def _write(self, *parts: bytes | memoryview) -> None:
        for part in parts:
            view = memoryview(part)
            while len(view):
                view = view[self._file.write(view) :]
            self._position += len(part)


def _write_sample(tar: _TarWriter, sample: Sample, media: MediaFormat) -> dict[str, Any]:
    columns = sample.columns()
    arrays = [
        array_entry(name, array, _add_array(tar, f"{sample.sample_id}.{name}.npy", array))
        for name, array in sample.arrays().items()
    ]
    about = {"media_format": "", "media_offset": -1, "media_size": 0}
    if sample.media is not None:
        form, encoded = media.choose(sample.media), media.encode(sample.media)
        offset = tar.add(f"{sample.sample_id}.{form}", encoded)
        about = {"media_format": form, "media_offset": offset, "media_size": len(encoded)}
    metadata = json.loads(columns["metadata"])
    described = {"prompt": sample.prompt, "prompt_id": sample.prompt_id, "metadata": metadata}
    tar.add(f"{sample.sample_id}.json", canonical_json(described).encode())
    return {**columns, "arrays": arrays, **about}


def _add_array(tar: _TarWriter, name: str, array: np.ndarray) -> int:
    """Append an array as .npy; return where its raw data starts."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(array))
    prefix = header.getvalue()
    return tar.add(name, prefix, array.data.cast("B") if array.size else b"") + len(prefix)
