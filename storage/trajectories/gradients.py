"""Gradients of a reward with respect to final latents: a table per shard, and a payload file that is read in ranges."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flowmill.configs.errors import CorruptError
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.artifacts.records import ShardRecord
from flowmill.storage.backends.base import Blob
from flowmill.storage.backends.checksums import REMEDY
from flowmill.storage.layout import ArtifactRef
from flowmill.storage.trajectories.arrays import stored_dtype
from flowmill.storage.trajectories.tables import read_shard, write_rows

PAYLOADS = "gradients.bin"


def write_gradients(
    folder: Path,
    columns: Mapping[str, Sequence[Any]],
    directions: Sequence[np.ndarray | None],
    labels: Mapping[str, str],
) -> None:
    """Write the files of a shard.

    Args:
        folder: folder of the shard.
        columns: ``sample_id``, ``prompt_id``, ``group_id``, ``value`` and ``rms``.
        directions: an array (...) of root mean square 1 per sample; None where there is no gradient.
        labels: values of the columns that identify the reward.
    """
    offsets, position = [], 0
    with (folder / PAYLOADS).open("wb") as file:
        for array in directions:
            offsets.append(-1 if array is None else position)
            position += 0 if array is None else file.write(np.ascontiguousarray(array).tobytes())
    properties: dict[str, Sequence[Any]] = {
        "dtype": ["" if array is None else str(array.dtype) for array in directions],
        "shape": [[] if array is None else list(array.shape) for array in directions],
        "offset": offsets,
    }
    write_rows("gradients", folder, {**columns, **properties}, labels)


@dataclass(frozen=True, slots=True)
class _GradientRow:
    """Location of the gradient of a sample."""

    ref: ArtifactRef
    record: ShardRecord
    rms: float
    dtype: str
    shape: tuple[int, ...]
    offset: int


class StoredGradients:
    """The gradients of one reward for samples of any number of artifacts; payloads are read on demand."""

    def __init__(self, store: ArtifactStore, refs: Sequence[ArtifactRef]) -> None:
        self._store = store
        self._rows: dict[str, _GradientRow] = {}
        self._blobs: dict[tuple[ArtifactRef, str], Blob] = {}
        for ref in refs:
            for record in store.shards(ref):
                table = read_shard(store, ref, record)
                columns = (table.column(name).to_pylist() for name in ("sample_id", "rms", "dtype", "shape", "offset"))
                for sample, rms, dtype, shape, offset in zip(*columns, strict=True):
                    self._rows[sample] = _GradientRow(ref, record, rms, dtype, tuple(shape), offset)

    def rms(self, sample_id: str) -> float:
        """Return the root mean square of a sample's gradient; 0 without one."""
        return self._row(sample_id).rms

    def rounding(self, sample_id: str) -> float:
        """Return the root mean square rounding error of a sample's stored gradient; 0 without one."""
        row = self._row(sample_id)
        return 0.0 if row.offset < 0 else row.rms * float(np.finfo(row.dtype).eps)

    def of(self, sample_id: str) -> np.ndarray | None:
        """Return the (...) float32 gradient of a sample, None if it has none."""
        row = self._row(sample_id)
        if row.offset < 0:
            return None
        try:
            kind = stored_dtype(row.dtype, row.shape)
        except ValueError as error:
            raise CorruptError(f"{row.ref}: the gradient of sample {sample_id}: {error}. {REMEDY}") from None
        key = (row.ref, row.record.shard)
        if key not in self._blobs:
            self._blobs[key] = self._store.files(row.ref, row.record).blob(PAYLOADS)
        data = self._blobs[key].read(row.offset, math.prod(row.shape) * kind.itemsize)
        gradient: np.ndarray = np.ndarray(row.shape, kind, data).astype(np.float32) * np.float32(row.rms)
        return gradient

    def _row(self, sample_id: str) -> _GradientRow:
        if sample_id not in self._rows:
            raise CorruptError(f"There is no gradient of sample {sample_id}, though there are some of its epoch.")
        return self._rows[sample_id]
