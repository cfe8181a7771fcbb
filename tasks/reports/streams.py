"""Committed samples as streams for training elsewhere: a pipeline of webdataset, a dataset of datasets.

Both take shards in order, split them by rank and worker, and continue at a position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from configs.errors import ConfigError, StoreError
from storage.artifacts.records import ShardRecord
from storage.layout import ArtifactRef
from storage.trajectories.tables import read_shard
from storage.trajectories.webdataset import TAR
from tasks.inputs.components import open_trajectory_store
from tasks.metrics.view import RunView
from tasks.runs.context import RunContext

if TYPE_CHECKING:
    import pyarrow as pa

#: Key of a sample's rewards and advantage in a stream.
SCORES = "scores"
_Scores = Mapping[str, Mapping[str, float | None]]
_DATASET = ("sample_id", "prompt_id", "group_id", "prompt", "metadata", "epoch", "seed", "policy")


def stream_of(context: RunContext, epoch: int, *, evaluation: bool, start: int) -> Any:
    """Return a ``webdataset.DataPipeline`` over the tars of an epoch's samples.

    A sample has the members of the tar by extension, undecoded (``png``, ``json``, ``latents.npy``, ...), ``__key__``,
    its id, and ``scores``, a mapping with ``reward``, ``advantage`` and ``reward.<label>`` as far as they exist.

    Args:
        context: the run.
        epoch: the epoch.
        evaluation: the samples of its evaluation.
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
    ref, scores = _ref(context, epoch, evaluation=evaluation), _scores(context, epoch, evaluation=evaluation)
    records = {record.shard: record for record in context.store.shards(ref)}

    def opened(shards: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        left = start
        for shard in shards:
            record = records[shard["url"]]
            if left >= record.rows:
                left -= record.rows
                continue
            known = scores(record)
            with (context.store.folder(ref, record) / TAR).open("rb") as tar:
                samples = group_by_keys(tar_file_expander([{"url": shard["url"], "stream": tar}]))
                for number, sample in enumerate(samples):
                    if number >= left:
                        yield {**sample, SCORES: known.get(str(sample["__key__"]), {})}
            left = 0

    return wds.DataPipeline(wds.SimpleShardList(list(records)), wds.split_by_node, wds.split_by_worker, opened)


def dataset_of(context: RunContext, epoch: int, *, evaluation: bool) -> Any:
    """Return a ``datasets.IterableDataset`` of an epoch's samples, a shard for each of theirs.

    Columns: those of the samples table that describe a sample, ``image`` (of clips ``video`` as bytes), ``text``, and
    ``reward``, ``advantage`` and ``reward.<label>`` as far as they exist.

    Args:
        context: the run.
        epoch: the epoch.
        evaluation: the samples of its evaluation.

    Raises:
        NotCommittedError: there are no such samples.
    """
    import datasets

    ref, scores = _ref(context, epoch, evaluation=evaluation), _scores(context, epoch, evaluation=evaluation)
    records = context.store.shards(ref)
    if not records:
        raise StoreError(f"{ref} has no samples.")

    def rows(shards: Sequence[ShardRecord]) -> Iterator[dict[str, Any]]:
        for record in shards:
            yield from _rows(context, ref, record, scores(record))

    first = next(rows(records[:1]))
    features = datasets.Features({name: _feature(name, value, datasets) for name, value in first.items()})
    return datasets.IterableDataset.from_generator(rows, features=features, gen_kwargs={"shards": list(records)})


def _ref(context: RunContext, epoch: int, *, evaluation: bool) -> ArtifactRef:
    return context.chain.require(*context.plan.samples_of(epoch, evaluation=evaluation)).ref


def _rows(context: RunContext, ref: ArtifactRef, record: ShardRecord, scores: _Scores) -> Iterator[dict[str, Any]]:
    """Yield the rows of one shard."""
    shard = open_trajectory_store(context.config.rollout.store).open(context.store.files(ref, record))
    for number, row in enumerate(shard.table.select(list(_DATASET)).to_pylist()):
        form = shard.media_format(number)
        if form:
            media = bytes(shard.media_file(number))
            row |= {"video": media} if form == "mp4" else {"image": {"bytes": media, "path": None}}
        text = shard.text(number)
        yield {**row, **({} if text is None else {"text": text}), **scores.get(row["sample_id"], {})}
    shard.close()


def _feature(name: str, value: Any, datasets: Any) -> Any:
    if name == "image":
        return datasets.Image()
    kinds = {bytes: "binary", int: "int64", str: "string"}
    return datasets.Value(kinds.get(type(value), "float32"))


def _scores(context: RunContext, epoch: int, *, evaluation: bool) -> Callable[[ShardRecord], _Scores]:
    """Return a function from a shard to the scores of its samples: rewards and advantage, or the rating of given
    samples, of which there may be more than memory holds."""
    if context.plan.given and not evaluation:
        ref = _ref(context, epoch, evaluation=evaluation)
        return lambda record: _by_sample(read_shard(context.store, ref, record, "rewards"))
    known = _by_sample(RunView(context).scores(epoch, evaluation=evaluation))
    return lambda record: known


def _by_sample(table: pa.Table) -> _Scores:
    names = [name for name in table.column_names if name.split(".")[0] in ("sample_id", "reward", "advantage")]
    return {str(row.pop("sample_id")): row for row in table.select(names).to_pylist()}
