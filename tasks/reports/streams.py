"""Committed samples for use elsewhere: a pipeline of webdataset, a dataset of datasets, and states as images.

Streams take shards in order, split them by rank and worker, and continue at a position.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from configs.errors import ConfigError, StoreError
from storage.artifacts.records import ShardRecord
from storage.layout import ArtifactRef
from storage.trajectories.tables import read_rows
from storage.trajectories.webdataset import TAR
from tasks.inputs.components import open_trajectory_store
from tasks.metrics.samples import arrays_of
from tasks.modalities.modality import make_kind
from tasks.runs.context import RunContext
from tasks.runtime.host import ModelHost
from tasks.specs.graph import Node

#: Key of a sample's rewards and advantage in a stream.
SCORES = "scores"
_DATASET = ("sample_id", "prompt_id", "group_id", "prompt", "metadata", "epoch", "seed", "policy")


def stream_of(context: RunContext, node: Node, *, start: int) -> Any:
    """Return a ``webdataset.DataPipeline`` over the tars of an artifact of samples.

    A sample has the members of the tar by extension, undecoded (``png``, ``json``, ``latents.npy``, ...), ``__key__``,
    its id, and ``scores``, a mapping with ``reward``, ``advantage`` and ``reward.<label>`` as far as they exist.

    Args:
        context: the run.
        node: the stage of the samples.
        start: number of samples to leave out, of those that this rank and worker would get.

    Raises:
        ConfigError: the samples are not stored in tars.
        NotCommittedError: there are no such samples.
    """
    import webdataset as wds
    from webdataset.tariterators import group_by_keys, tar_file_expander

    if context.config.rollout.store != "webdataset":
        raise ConfigError(
            f"rollout.store is '{context.config.rollout.store}', so the samples of run '{context.run.name}' are in no "
            "tars. Read them with dataset(), or set rollout.store to 'webdataset' in the next run."
        )
    ref = context.chain.require(*node).ref
    records = {record.shard: record for record in context.store.shards(ref)}
    scores = _Scores(context, node)

    def opened(shards: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        left = start
        for shard in shards:
            record = records[shard["url"]]
            if left >= record.rows:
                left -= record.rows
                continue
            with (context.store.folder(ref, record) / TAR).open("rb") as tar:
                samples = group_by_keys(tar_file_expander([{"url": shard["url"], "stream": tar}]))
                for number, sample in enumerate(samples):
                    if number >= left:
                        yield {**sample, SCORES: scores.of(str(sample["__key__"]))}
            left = 0

    return wds.DataPipeline(wds.SimpleShardList(list(records)), wds.split_by_node, wds.split_by_worker, opened)


def dataset_of(context: RunContext, node: Node) -> Any:
    """Return a ``datasets.IterableDataset`` of an artifact of samples, a shard for each of theirs.

    Columns: those of the samples table that describe a sample, ``image`` (of clips ``video`` as bytes), ``text``, and
    ``reward``, ``advantage`` and ``reward.<label>`` as far as they exist.

    Args:
        context: the run.
        node: the stage of the samples.

    Raises:
        NotCommittedError: there are no such samples.
    """
    import datasets

    ref = context.chain.require(*node).ref
    records = context.store.shards(ref)
    if not records:
        raise StoreError(f"{ref} has no samples.")
    scores = _Scores(context, node)

    def rows(shards: Sequence[ShardRecord]) -> Iterator[dict[str, Any]]:
        for record in shards:
            yield from _rows(context, ref, record, scores)

    first = next(rows(records[:1]))
    features = datasets.Features({name: _feature(name, value, datasets) for name, value in first.items()})
    return datasets.IterableDataset.from_generator(rows, features=features, gen_kwargs={"shards": list(records)})


def _rows(context: RunContext, ref: ArtifactRef, record: ShardRecord, scores: _Scores) -> Iterator[dict[str, Any]]:
    """Yield the rows of one shard."""
    shard = open_trajectory_store(context.config.rollout.store).open(context.store.files(ref, record))
    for number, row in enumerate(shard.table.select(list(_DATASET)).to_pylist()):
        form = shard.media_format(number)
        if form:
            media = bytes(shard.media_file(number))
            row |= {"video": media} if form == "mp4" else {"image": {"bytes": media, "path": None}}
        text = shard.text(number)
        yield {**row, **({} if text is None else {"text": text}), **scores.of(row["sample_id"])}
    shard.close()


def _feature(name: str, value: Any, datasets: Any) -> Any:
    if name == "image":
        return datasets.Image()
    kinds = {bytes: "binary", int: "int64", str: "string"}
    return datasets.Value(kinds.get(type(value), "float32"))


class _Scores:
    """Rewards and advantages by sample."""

    def __init__(self, context: RunContext, node: Node) -> None:
        self._columns: dict[str, dict[str, float | None]] = {}
        for name, table, column in _tables(context, node):
            ids, values = (table.column(each).to_pylist() for each in ("sample_id", column))
            self._columns[name] = dict(zip(ids, values, strict=True))

    def of(self, sample: str) -> dict[str, float | None]:
        """Return the scores of a sample by name; None where it has none."""
        return {name: values.get(sample) for name, values in self._columns.items()}


def _tables(context: RunContext, node: Node) -> Iterator[tuple[str, pa.Table, str]]:
    """Yield name, table and column of each score of an artifact of samples."""
    chain, store, config = context.chain, context.store, context.config
    if node.stage == "ingest":
        yield "reward", read_rows(store, chain.require(*node).ref, "rewards"), "reward"
        return
    evaluated = node.stage == "evaluate"
    sections = (*config.rewards, *config.evaluate.judges) if evaluated else config.scored
    for section in sections:
        entry = chain.find(node.epoch, "judge" if evaluated else "score", section.slot)
        if entry is not None:
            yield f"reward.{section.slot}", read_rows(store, entry.ref), "reward"
    advantages = None if evaluated else chain.find(node.epoch, "advantage")
    if advantages is not None:
        table = read_rows(store, advantages.ref)
        yield "reward", table, "reward"
        yield "advantage", table, "advantage"


class States:
    """Shows the intermediate states of samples: stored latents, decoded by the base model's decoder."""

    def __init__(self, context: RunContext) -> None:
        """Load the decoder.

        Args:
            context: the run; not a read-only one, as its record may name code.

        Raises:
            StoreError: samples of this kind have no visible states.
        """
        self._store = context.store
        self._decode = make_kind(context.config).decoder(context.config, ModelHost(context))

    def of(self, ref: ArtifactRef, sample: str) -> np.ndarray:
        """Return the decoded image of every stored state of a sample, (N, H, W, 3) or (N, F, H, W, 3) uint8.

        Raises:
            StoreError: the artifact lacks the sample.
            CorruptError: no latents are stored, or a file is damaged.
        """
        return self._decode(arrays_of(self._store, ref, "latents", [sample])[sample])
