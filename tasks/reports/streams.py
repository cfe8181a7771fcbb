"""Committed samples as streams for training elsewhere: a pipeline of webdataset, a dataset of datasets.

Both take shards in order, split them by rank and worker, and continue at a position.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import pyarrow as pa

from flowmill.configs.errors import ConfigError, StoreError
from flowmill.configs.exits import uninterrupted
from flowmill.storage.artifacts.records import ShardRecord
from flowmill.storage.trajectories.base import TrajectoryShard
from flowmill.storage.trajectories.tables import read_shard
from flowmill.storage.trajectories.webdataset import TAR
from flowmill.tasks.inputs.components import open_trajectory_store
from flowmill.tasks.metrics.view import RunView
from flowmill.tasks.runs.context import RunContext

#: Key of a sample's rewards and advantage in a stream.
SCORES = "scores"
_Scores = Mapping[str, Mapping[str, float | None]]
_COLUMNS = ("sample_id", "prompt_id", "group_id", "prompt", "metadata", "epoch", "seed", "policy")


def stream_of(context: RunContext, epoch: int, *, evaluation: bool, start: int) -> Any:
    """Return a ``webdataset.DataPipeline`` over the tars of an epoch's samples.

    A sample has the members of the tar by extension, undecoded (``png``, ``json``, ``latents.npy``, ...), ``__key__``,
    its id, and ``scores``, a mapping with ``reward``, ``advantage`` and ``reward.<label>`` as far as they exist.

    Args:
        evaluation: the samples of its evaluation.
        start: number of samples to leave out, of those that this rank and worker would get.
    """
    with uninterrupted():
        import webdataset as wds
        from webdataset.tariterators import group_by_keys, tar_file_expander

    if context.config.rollout.store != "webdataset":
        raise ConfigError(
            f"rollout.store is '{context.config.rollout.store}', so the samples of run '{context.run.name}' are in no "
            "tars. Read them with dataset(), or set rollout.store to 'webdataset' in the next run."
        )
    samples = SampleRows(context, epoch, evaluation=evaluation)
    records = {record.shard: record for record in samples.records}

    def opened(shards: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        left = start
        for shard in shards:
            record = records[shard["url"]]
            if left >= record.rows:
                left -= record.rows
                continue
            scores = samples.scores(record)
            with (context.store.folder(samples.ref, record) / TAR).open("rb") as tar:
                members = group_by_keys(tar_file_expander([{"url": shard["url"], "stream": tar}]))
                for number, sample in enumerate(members):
                    if number >= left:
                        yield {**sample, SCORES: scores.get(str(sample["__key__"]), {})}
            left = 0

    return wds.DataPipeline(wds.SimpleShardList(list(records)), wds.split_by_node, wds.split_by_worker, opened)


def dataset_of(context: RunContext, epoch: int, *, evaluation: bool) -> Any:
    """Return a ``datasets.IterableDataset`` of an epoch's samples, a shard for each of theirs.

    Columns: those of ``SampleRows``; clips are not decoded, which needs torchcodec: cast their column to
    ``datasets.Video()``.

    Args:
        evaluation: the samples of its evaluation.
    """
    with uninterrupted():
        import datasets

    samples = SampleRows(context, epoch, evaluation=evaluation)

    def rows(shards: Sequence[ShardRecord]) -> Iterator[dict[str, Any]]:
        for record in shards:
            yield from samples.of_shard(record)

    # A shard of ingested samples may have none: all its rows were left out.
    first = next(rows(samples.records), None)
    if first is None:
        raise StoreError(f"{samples.ref} has no samples.")
    features = features_of(first)
    return datasets.IterableDataset.from_generator(rows, features=features, gen_kwargs={"shards": samples.records})


class SampleRows:
    """The samples of a rollout or an evaluation, or the ingested ones, as rows for other tools.

    Columns: those of the samples table that describe a sample, ``image`` or ``video`` (its file, as datasets stores
    it), ``text``, and ``reward``, ``advantage`` and ``reward.<label>`` as far as they exist.
    """

    def __init__(self, context: RunContext, epoch: int, *, evaluation: bool) -> None:
        """Bind to an epoch; raise NotCommittedError if there are no such samples."""
        self._context, self._epoch, self._evaluation = context, epoch, evaluation
        self.ref = context.chain.require(*context.plan.samples_of(epoch, evaluation=evaluation)).ref
        self.records = list(context.store.shards(self.ref))

    def of_shard(self, record: ShardRecord) -> Iterator[dict[str, Any]]:
        """Yield the rows of one shard."""
        store, opener = self._context.store, open_trajectory_store(self._context.config.rollout.store)
        shard, scores = opener.open(store.files(self.ref, record)), self.scores(record)
        for number, row in enumerate(shard.table.select(list(_COLUMNS)).to_pylist()):
            yield {**row, **content_of(shard, number), **scores.get(row["sample_id"], {})}
        shard.close()

    def scores(self, record: ShardRecord) -> _Scores:
        """Return the rewards and the advantage of the samples of one shard by name; the rating of ingested samples, of
        which there may be more than memory holds."""
        if self._context.plan.has_data and not self._evaluation:
            return _by_sample(read_shard(self._context.store, self.ref, record, "rewards"))
        return self._scores

    @cached_property
    def _scores(self) -> _Scores:
        return _by_sample(RunView(self._context).scores(self._epoch, evaluation=self._evaluation))


def _by_sample(table: pa.Table) -> _Scores:
    names = [name for name in table.column_names if name.split(".")[0] in ("sample_id", "reward", "advantage")]
    return {str(row.pop("sample_id")): row for row in table.select(names).to_pylist()}


def content_of(shard: TrajectoryShard, row: int) -> dict[str, Any]:
    """Return the stored image or clip, and the text, of a row by the names of their columns."""
    form, text = shard.media_format(row), shard.text(row)
    media = {"bytes": bytes(shard.media_file(row)), "path": f"{row}.{form}"} if form else None
    content = {} if media is None else {"video" if form == "mp4" else "image": media}
    return content if text is None else {**content, "text": text}


def features_of(row: Mapping[str, Any]) -> Any:
    """Return the ``datasets.Features`` of rows like this one; numbers that are missing in it are float32."""
    import datasets

    def feature(value: Any) -> Any:
        if isinstance(value, Mapping):
            return datasets.Video(decode=False) if value["path"].endswith(".mp4") else datasets.Image()
        return datasets.Value({int: "int64", str: "string", bool: "bool"}.get(type(value), "float32"))

    return datasets.Features({name: feature(value) for name, value in row.items()})
