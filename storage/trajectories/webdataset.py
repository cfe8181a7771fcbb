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
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from configs.fingerprint import canonical_json
from storage.files import Files
from storage.media import DEFAULT_MEDIA, MediaFormat
from storage.schema import SAMPLES, read_table, write_table
from storage.trajectories.base import Sample, TrajectoryShard, array_entry

TABLE = "samples.parquet"
TAR = "samples.tar"
_BLOCK = 512


class WebDatasetStore:
    """One ``samples.parquet`` and one ``samples.tar`` per shard."""

    def write(self, folder: Path, samples: Sequence[Sample], media: MediaFormat = DEFAULT_MEDIA) -> None:
        """Write the tar, then the table with the payload offsets."""
        rows: dict[str, list[Any]] = {name: [] for name in SAMPLES.names}
        with (
            (folder / TAR).open("wb") as file,
            tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar,
        ):
            for sample in samples:
                for name, value in _write_sample(tar, sample, media).items():
                    rows[name].append(value)
        write_table(folder / TABLE, rows, SAMPLES)

    def open(self, files: Files) -> TrajectoryShard:
        """Open a shard.

        Raises:
            CorruptError: the table is not a samples table.
        """
        return TrajectoryShard(read_table(files, TABLE, SAMPLES), lambda: files.blob(TAR), f"{files.where}/{TAR}")


def _write_sample(tar: tarfile.TarFile, sample: Sample, media: MediaFormat) -> dict[str, Any]:
    columns = sample.columns()
    arrays = [
        array_entry(name, array, _add_array(tar, f"{sample.sample_id}.{name}.npy", array))
        for name, array in sample.arrays().items()
    ]
    about = {"media_format": "", "media_offset": -1, "media_size": 0}
    if sample.media is not None:
        form = media.choose(sample.media)
        offset, size = _add(tar, f"{sample.sample_id}.{form}", media.encode(sample.media))
        about = {"media_format": form, "media_offset": offset, "media_size": size}
    metadata = json.loads(columns["metadata"])
    described = {"prompt": sample.prompt, "prompt_id": sample.prompt_id, "metadata": metadata}
    _add(tar, f"{sample.sample_id}.json", canonical_json(described).encode())
    return {**columns, "arrays": arrays, **about}


def _add_array(tar: tarfile.TarFile, name: str, array: np.ndarray) -> int:
    """Append an array as .npy; return where its raw data starts."""
    start, size = _add(tar, name, _npy(array))
    return start + size - array.nbytes


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> tuple[int, int]:
    """Append a member without times or owners; return where its data starts and how long it is."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    info.mode = 0o644
    start = tar.offset + _BLOCK
    tar.addfile(info, io.BytesIO(data))
    return start, len(data)


def _npy(array: np.ndarray) -> bytes:
    buffer: BinaryIO = io.BytesIO()
    np.lib.format.write_array(buffer, array, version=(1, 0), allow_pickle=False)
    return buffer.getvalue()  # type: ignore[attr-defined,no-any-return]
