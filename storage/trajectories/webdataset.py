"""The default store: one Parquet table beside one WebDataset tar.

The tar holds ``<sample>.latents.npy``, ``<sample>.png``, ``<sample>.json`` and, where asked for,
``<sample>.means.npy``. Members start at multiples of 512 and npy payloads at multiples of 64 within them, so latents
are read through a memory map at the offset the table gives, and any ``tar``, ``webdataset`` or ``datasets`` user can
read the same file.
"""

from __future__ import annotations

import io
import json
import math
import mmap
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
from PIL import Image

from configs.errors import CorruptError
from configs.fingerprint import canonical_json
from storage.schema import SAMPLES, read_table, write_table
from storage.trajectories.base import Sample

TABLE = "samples.parquet"
TAR = "samples.tar"
_BLOCK = 512


class WebDatasetStore:
    """One ``samples.parquet`` and one ``samples.tar`` per shard."""

    def write(self, folder: Path, samples: Sequence[Sample]) -> None:
        """Write the tar, then the table with the payload offsets."""
        rows: dict[str, list[Any]] = {name: [] for name in SAMPLES.names}
        with (
            (folder / TAR).open("wb") as file,
            tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar,
        ):
            for sample in samples:
                for name, value in _write_sample(tar, sample).items():
                    rows[name].append(value)
        write_table(folder / TABLE, rows, SAMPLES)

    def open(self, folder: Path) -> WebDatasetShard:
        """Open a shard.

        Raises:
            CorruptError: the table is not a samples table, or a payload range lies outside the tar.
        """
        return WebDatasetShard(folder)


class WebDatasetShard:
    """A shard opened for reading: the table in memory, the tar mapped."""

    def __init__(self, folder: Path) -> None:
        """Read the table and map the tar."""
        self.table: pa.Table = read_table(folder / TABLE, SAMPLES)
        self._path = folder / TAR
        with self._path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._columns = {name: self.table.column(name).to_pylist() for name in _PAYLOAD_COLUMNS}

    def latents(self, row: int) -> np.ndarray:
        """Return a read-only view of a row's latents in the mapped tar.

        Raises:
            CorruptError: the byte range does not hold an array of the shape and dtype in the table.
        """
        return self._view("latents", row, self._columns["latents_shape"][row], self._columns["latents_dtype"][row])

    def means(self, row: int) -> np.ndarray:
        """Return a read-only view of a row's step means in the mapped tar.

        Raises:
            CorruptError: none are stored, or the byte range does not hold them.
        """
        shape = [len(self._columns["steps"][row]), *self._columns["latents_shape"][row][1:]]
        return self._view("means", row, shape, "float32")

    def _view(self, payload: str, row: int, shape: Sequence[int], dtype_name: str) -> np.ndarray:
        dtype, count = np.dtype(dtype_name), math.prod(shape)
        offset, size = self._columns[f"{payload}_offset"][row], self._columns[f"{payload}_size"][row]
        if offset < 0 or size != count * dtype.itemsize or offset + size > len(self._map):
            raise CorruptError(
                f"{self._path}: {payload} of row {row} are {size} bytes at {offset}, but shape {list(shape)} of "
                f"{dtype} needs {count * dtype.itemsize} bytes within {len(self._map)}."
            )
        return np.frombuffer(self._map, dtype, count, offset).reshape(shape)

    def media(self, row: int) -> np.ndarray:
        """Decode a row's image, (H, W, 3) uint8."""
        offset, size = self._columns["media_offset"][row], self._columns["media_size"][row]
        with Image.open(io.BytesIO(self._map[offset : offset + size])) as image:
            return np.asarray(image.convert("RGB"))


_PAYLOAD_COLUMNS = (
    "latents_shape",
    "latents_dtype",
    "latents_offset",
    "latents_size",
    "means_offset",
    "means_size",
    "steps",
    "media_offset",
    "media_size",
)


def _write_sample(tar: tarfile.TarFile, sample: Sample) -> dict[str, Any]:
    latents = np.zeros((0,), np.float32) if sample.latents is None else np.ascontiguousarray(sample.latents)
    latents_offset = -1 if sample.latents is None else _add_array(tar, f"{sample.sample_id}.latents.npy", latents)
    means = np.zeros((0,), np.float32) if sample.means is None else np.ascontiguousarray(sample.means, np.float32)
    means_offset = -1 if sample.means is None else _add_array(tar, f"{sample.sample_id}.means.npy", means)
    media = _png(sample.media)
    media_offset, _ = _add(tar, f"{sample.sample_id}.png", media)
    metadata = canonical_json(dict(sample.metadata))
    about = {"prompt": sample.prompt, "prompt_id": sample.prompt_id, "metadata": json.loads(metadata)}
    _add(tar, f"{sample.sample_id}.json", canonical_json(about).encode())
    return {
        "sample_id": sample.sample_id,
        "prompt_id": sample.prompt_id,
        "group_id": sample.group_id,
        "prompt": sample.prompt,
        "metadata": metadata,
        "epoch": sample.epoch,
        "replica": sample.replica,
        "seed": sample.seed,
        "policy": sample.policy,
        "sigmas": list(sample.sigmas),
        "steps": list(sample.steps),
        "states": list(sample.states),
        "log_probs": np.asarray(sample.log_probs, np.float32),
        "reference_kl": np.asarray(sample.reference_kl, np.float32),
        "latents_dtype": str(latents.dtype),
        "latents_shape": list(latents.shape),
        "latents_offset": latents_offset,
        "latents_size": latents.nbytes,
        "means_offset": means_offset,
        "means_size": means.nbytes,
        "media_format": "png",
        "media_offset": media_offset,
        "media_size": len(media),
    }


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


def _png(image: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()
