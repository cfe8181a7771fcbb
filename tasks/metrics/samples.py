"""Stored samples of any artifact: rows, texts, images, clips and arrays, by sample id."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from flowmill.configs.errors import StoreError, TrustError
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.layout import ArtifactRef
from flowmill.storage.trajectories.base import ARRAYS, Sample, TrajectoryShard
from flowmill.storage.trajectories.tables import TABLES, read_rows
from flowmill.tasks.inputs.components import open_trajectory_store

#: Columns with payload locations, which do not describe a sample.
_PLACES = ("arrays", "media_offset", "media_size")
#: Kinds of artifacts that hold samples.
_SAMPLES = ("trajectories", "renders", "evaluations")


def stored_as(options: Mapping[str, Any]) -> str:
    """Return the trajectory store of an artifact of samples, from the options in its manifest."""
    return str(options["rollout"]["store"] if "rollout" in options else options["store"])


def check_reader(store: ArtifactStore, ref: ArtifactRef) -> None:
    """Check that no code which only the store names would read an artifact of samples.

    Raises:
        TrustError: the manifest names a custom trajectory store, whose module this process has not imported.
    """
    name = stored_as(store.require(ref).options) if ref.kind in _SAMPLES else ""
    if ":" in name and name.partition(":")[0] not in sys.modules:
        raise TrustError(
            f"{ref} names '{name}' as the reader of its samples, which only the store names: not imported. If it is "
            f"yours, import '{name.partition(':')[0]}' first, or read the samples through their run."
        )


def shards_of(store: ArtifactStore, ref: ArtifactRef) -> Iterator[TrajectoryShard]:
    """Yield the opened shards of an artifact that holds samples, in order."""
    options = store.require(ref).options
    if ref.kind not in _SAMPLES:
        raise StoreError(f"{ref} holds no samples; {', '.join(_SAMPLES)} do. 'flowmill store ls' lists them.")
    opener = open_trajectory_store(stored_as(options))
    for record in store.shards(ref):
        yield opener.open(store.files(ref, record))


def ids_of(requested: Collection[str]) -> set[str]:
    """Return the ids of samples that a caller names; a text is one id, not a collection of letters."""
    return {requested} if isinstance(requested, str) else set(requested)


def rows_of(
    store: ArtifactStore, ref: ArtifactRef, requested: Collection[str] | None
) -> Iterator[tuple[str, TrajectoryShard, int]]:
    """Yield id, opened shard and row of the requested samples (None: all) in shard order."""
    left = None if requested is None else ids_of(requested)
    for shard in shards_of(store, ref):
        for row, sample in enumerate(shard.table.column("sample_id").to_pylist()):
            if left is None or sample in left:
                yield sample, shard, row
        left = None if left is None else left - set(shard.table.column("sample_id").to_pylist())
    if left:
        raise StoreError(f"{ref} has no sample '{min(left)}'.")


def places_of(
    store: ArtifactStore, ref: ArtifactRef, requested: Collection[str] | None
) -> dict[str, tuple[TrajectoryShard, int]]:
    """Return opened shard and row of the requested samples by id; see ``rows_of``."""
    return {sample: (shard, row) for sample, shard, row in rows_of(store, ref, requested)}


def stored_sample(shard: TrajectoryShard, row: int) -> Sample:
    """Return the sample of a row as it was stored, with its arrays and its image."""
    fields = shard.table.slice(row, 1).drop_columns([*_PLACES, "media_format"]).to_pylist()[0]
    fields["metadata"] = json.loads(fields["metadata"])
    for name in ("log_probs", "reference_kl"):
        fields[name] = np.array(fields[name], np.float32)
    fields |= {name: shard.array(name, row).copy() for name in ARRAYS if shard.shape(name, row)}
    return Sample(**fields, media=shard.media(row) if shard.media_format(row) else None)


def about_sample(shard: TrajectoryShard, row: int) -> tuple[str, dict[str, Any]]:
    """Return id and metadata of the sample of a row."""
    name, metadata = (shard.table.column(column)[row].as_py() for column in ("sample_id", "metadata"))
    return name, json.loads(metadata)


def artifact_table(store: ArtifactStore, ref: ArtifactRef) -> pa.Table:
    """Return all rows of an artifact of samples, prompts, rewards or advantages, in shard order."""
    if ref.kind in _SAMPLES:
        return pa.concat_tables([_readable(shard) for shard in shards_of(store, ref)])
    if ref.kind not in TABLES:
        raise StoreError(f"{ref} has no table of rows; {', '.join((*TABLES, *_SAMPLES))} have.")
    store.require(ref)
    return read_rows(store, ref)


def _readable(shard: TrajectoryShard) -> pa.Table:
    """Return a shard's table for people: without payload locations, with the stored texts if samples are texts."""
    table = shard.table.drop_columns([*_PLACES])
    written = [shard.text(row) for row in range(table.num_rows)]
    is_text = any(text is not None for text in written)
    return table.append_column("text", pa.array(written, pa.string())) if is_text else table


def media_of(store: ArtifactStore, ref: ArtifactRef, requested: Collection[str] | None = None) -> dict[str, np.ndarray]:
    """Return images, (H, W, 3) uint8, or clips, (F, H, W, 3) uint8, by sample id, in shard order."""
    return {sample: media_in(sample, shard, row) for sample, shard, row in rows_of(store, ref, requested)}


def media_in(sample: str, shard: TrajectoryShard, row: int) -> np.ndarray:
    """Return the image or clip of a sample in a row; StoreError if it has none."""
    if not shard.media_format(row):
        raise StoreError(
            f"Sample '{sample}' has no image or clip: it is a text, which the column 'text' of the table of samples "
            "has, or was stored with rollout.media.format none."
        )
    return shard.media(row)


def arrays_of(
    store: ArtifactStore, ref: ArtifactRef, name: str, requested: Collection[str] | None = None
) -> dict[str, np.ndarray]:
    """Return copies of a stored array, such as 'latents', (N, ...), by sample id, in shard order.

    Raises:
        StoreError: samples have no array of this name, or the rollout stored none of them.
    """
    arrays = {}
    for sample, shard, row in rows_of(store, ref, requested):
        if not shard.shape(name, row):
            stored = [each for each in ARRAYS if shard.shape(each, row)]
            raise StoreError(f"{ref} stores no '{name}' of sample '{sample}', only: {', '.join(stored) or 'nothing'}.")
        arrays[sample] = shard.array(name, row).copy()
    return arrays


def film_of(shard: TrajectoryShard, row: int, *, fps: int) -> bytes | None:
    """Return an mp4 (H.264, AAC) of a stored clip with sound; None for every other sample.

    Browsers do not play the lossless stored file.
    """
    from flowmill.storage.trajectories.media import MediaFormat

    sound = shard.sound_of(row)
    if sound is None:
        return None
    return MediaFormat(name="mp4", lossless=False, fps=fps, codec="aac").encode(shard.media(row), sound)


def joined(table: pa.Table, other: pa.Table, columns: dict[str, str]) -> pa.Table:
    """Return a table with columns of another one under new names, joined by sample id; null where it has no row."""
    # Imported late: it imports Arrow, which commands that only describe runs do without.
    from pyarrow.compute import index_in

    if table.column("sample_id") != other.column("sample_id"):
        places = index_in(table.column("sample_id"), value_set=other.column("sample_id"))
        other = other.select(list(columns)).take(places)
    for column, name in columns.items():
        table = table.append_column(name, other.column(column))
    return table
