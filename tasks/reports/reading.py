"""Results of a run as tables and images for people."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from configs.errors import StoreError
from storage.artifacts.commit import ArtifactStore
from storage.layout import ArtifactRef
from storage.trajectories.base import TrajectoryShard
from storage.trajectories.tables import TABLES, read_rows
from tasks.inputs.components import open_trajectory_store
from tasks.inputs.renderer import image_name, sample_name
from tasks.metrics.evaluations import evaluated_epochs, evaluation_figures, finished_evaluations
from tasks.metrics.points import Point
from tasks.metrics.tracked import epoch_content, evaluation_content
from tasks.runs.chain import Chain
from tasks.runs.context import RunContext
from tasks.runs.staleness import standings
from tasks.specs.graph import Node

#: Columns with payload locations, which do not describe a sample.
_PLACES = ("arrays", "media_offset", "media_size")
#: Kinds of artifacts that hold samples.
_SAMPLES = ("trajectories", "renders", "evaluations")


def shards_of(store: ArtifactStore, ref: ArtifactRef) -> Iterator[TrajectoryShard]:
    """Yield the opened shards of an artifact that holds samples, in order.

    Raises:
        StoreError: the artifact holds no samples.
        NotCommittedError: it is not complete.
        CorruptError: a table is damaged.
    """
    options = store.require(ref).options
    if ref.kind not in _SAMPLES:
        raise StoreError(f"{ref} holds no samples; {', '.join(_SAMPLES)} do. 'flowmill store ls' lists them.")
    opener = open_trajectory_store(options["rollout"]["store"] if "rollout" in options else options["store"])
    for record in store.shards(ref):
        yield opener.open(store.files(ref, record))


def rows_of(
    store: ArtifactStore, ref: ArtifactRef, wanted: Collection[str] | None
) -> Iterator[tuple[str, TrajectoryShard, int]]:
    """Yield id, opened shard and row of the wanted samples (None: all) in shard order.

    Raises:
        StoreError: the artifact lacks a wanted sample, or holds none.
        CorruptError: a table is damaged.
    """
    left: set[str] | None = None if wanted is None else set(wanted)
    for shard in shards_of(store, ref):
        for row, sample in enumerate(shard.table.column("sample_id").to_pylist()):
            if left is None or sample in left:
                yield sample, shard, row
        left = None if left is None else left - set(shard.table.column("sample_id").to_pylist())
    if left:
        raise StoreError(f"{ref} has no sample '{min(left)}'.")


def artifact_table(store: ArtifactStore, ref: ArtifactRef) -> pa.Table:
    """Return all rows of an artifact of samples, prompts, rewards or advantages, in shard order.

    Raises:
        StoreError: artifacts of this kind have no table.
        NotCommittedError: it is not complete.
        CorruptError: a table is damaged.
    """
    if ref.kind in _SAMPLES:
        return pa.concat_tables([_readable(shard) for shard in shards_of(store, ref)])
    if ref.kind not in TABLES:
        raise StoreError(f"{ref} has no table of rows; {', '.join((*TABLES, *_SAMPLES))} have.")
    store.require(ref)
    return read_rows(store, ref)


def _readable(shard: TrajectoryShard) -> pa.Table:
    """Return a shard's table for people: without payload locations, with the stored texts."""
    table = shard.table.drop_columns([*_PLACES])
    written = texts_of(shard)
    return table if written is None else table.append_column("text", written)


def texts_of(shard: TrajectoryShard) -> pa.Array | None:
    """Return the texts of a shard, one per row; None if its samples are not texts."""
    written = [shard.text(row) for row in range(shard.table.num_rows)]
    return pa.array(written, pa.string()) if any(text is not None for text in written) else None


def samples_of_epoch(chain: Chain, epoch: int) -> pa.Table:
    """Return the samples of an epoch with their rewards and advantages, as far as these are committed.

    Additional columns, null where a sample has no value: 'reward.<label>' of each scored reward and monitor; 'reward'
    (the optimized sum) and 'advantage' after the advantage stage; the lists 'advantages', 'returns', 'values' and
    'reference_log_probs' with advantages per token; 'modality_advantages' with advantages per modality. For rendered
    texts 'media_format' is the format of their images.

    Raises:
        NotCommittedError: the epoch has no rollout.
        CorruptError: a table is damaged.
    """
    store = chain.store
    table = artifact_table(store, chain.require(epoch, "rollout").ref)
    table = _drawn(table, chain, Node(epoch, "render"))
    for section in chain.config.scored:
        entry = chain.find(epoch, "score", section.slot)
        if entry is not None:
            table = _joined(table, read_rows(store, entry.ref), {"reward": f"reward.{section.slot}"})
    entry = chain.find(epoch, "advantage")
    if entry is not None:
        table = _joined(table, read_rows(store, entry.ref), {"reward": "reward", "advantage": "advantage"})
        if chain.plan.estimator.per_token:
            tokens = read_rows(store, entry.ref, "token_advantages")
            table = _joined(table, tokens, {name: name for name in tokens.column_names[1:]})
        if any(reward.modality is not None for reward in chain.config.rewards):
            apart = read_rows(store, entry.ref, "modality_advantages")
            table = _joined(table, apart, {name: name for name in apart.column_names[1:]})
    return table


def samples_of_evaluation(chain: Chain, epoch: int) -> pa.Table:
    """Return the samples of the run's own evaluation of an epoch, with 'reward.<label>' of each reward and judge.

    Raises:
        NotCommittedError: the epoch has no evaluation.
        CorruptError: a table is damaged.
    """
    config, store = chain.config, chain.store
    table = artifact_table(store, chain.require(epoch, "evaluate").ref)
    table = _drawn(table, chain, Node(epoch, "depict"))
    for section in (*config.rewards, *config.evaluate.judges):
        entry = chain.find(epoch, "judge", section.slot)
        if entry is not None:
            table = _joined(table, read_rows(store, entry.ref), {"reward": f"reward.{section.slot}"})
    return table


def pictures_of(
    chain: Chain, epoch: int, samples: Collection[str] | None = None, *, evaluation: bool = False
) -> dict[str, np.ndarray]:
    """Return the images or clips of the samples of an epoch, as ``media_of``; (K, H, W, 3) with K images per text.

    Args:
        chain: the run.
        epoch: the epoch.
        samples: ids; all when None.
        evaluation: samples of the run's evaluation, not of its rollout.

    Raises:
        NotCommittedError: the samples are not committed yet.
        StoreError: there is no such sample, or it has no image.
        CorruptError: a file is damaged.
    """
    render, store = chain.config.render, chain.store
    ref = chain.require(*chain.plan.media_of(epoch, evaluation=evaluation)).ref
    if render is None or render.images == 1:
        return media_of(store, ref, samples)
    names = {name: [image_name(name, n, of=render.images) for n in range(render.images)] for name in samples or ()}
    wanted = None if samples is None else {each for images in names.values() for each in images}
    found: dict[str, list[np.ndarray]] = {}
    for name, image in media_of(store, ref, wanted).items():
        found.setdefault(sample_name(name), []).append(image)
    return {name: np.stack(images) for name, images in found.items()}


def _drawn(table: pa.Table, chain: Chain, node: Node) -> pa.Table:
    """Return a table of texts with the format of their images, if they are rendered."""
    render = chain.config.render
    if render is None or chain.find(*node) is None:
        return table
    formats = pa.array([render.format] * table.num_rows, pa.string())
    return table.set_column(table.column_names.index("media_format"), "media_format", formats)


def references_of(context: RunContext, ref: ArtifactRef, wanted: Collection[str]) -> dict[str, list[np.ndarray]]:
    """Return the input images of the samples' prompts, (H, W, 3) uint8 each, by sample id.

    The lists are empty if the prompts have no input images, or if an older version did not store them.

    Raises:
        StoreError: the artifact lacks a wanted sample.
        CorruptError: a file is damaged.
    """
    if not context.holds_references:
        return {sample: [] for sample in wanted}
    rows = list(rows_of(context.store, ref, wanted))
    metadata = [json.loads(shard.table.column("metadata")[row].as_py()) for _, shard, row in rows]
    return dict(zip([sample for sample, _, _ in rows], context.references(metadata), strict=True))


def media_of(store: ArtifactStore, ref: ArtifactRef, wanted: Collection[str] | None = None) -> dict[str, np.ndarray]:
    """Return images, (H, W, 3) uint8, or clips, (F, H, W, 3) uint8, by sample id, in shard order.

    Raises:
        StoreError: the artifact lacks a wanted sample, or holds no media.
        CorruptError: a file is damaged.
    """
    return {sample: shard.media(row) for sample, shard, row in rows_of(store, ref, wanted)}


def arrays_of(
    store: ArtifactStore, ref: ArtifactRef, name: str, wanted: Collection[str] | None = None
) -> dict[str, np.ndarray]:
    """Return copies of a stored array, such as 'latents', (N, ...), by sample id, in shard order.

    Raises:
        StoreError: the artifact lacks a wanted sample.
        CorruptError: the array is not stored, or a file is damaged.
    """
    return {sample: shard.array(name, row).copy() for sample, shard, row in rows_of(store, ref, wanted)}


class States:
    """Shows the intermediate states of samples: stored latents, decoded by the base model's decoder."""

    def __init__(self, context: RunContext) -> None:
        """Load the decoder.

        Args:
            context: the run; not a read-only one, as its record may name code.

        Raises:
            StoreError: samples of this kind have no visible states.
        """

        from tasks.modalities.modality import make_kind
        from tasks.runtime.host import ModelHost

        self._store = context.store
        self._decode = make_kind(context.config).decoder(context.config, ModelHost(context))

    def of(self, ref: ArtifactRef, sample: str) -> np.ndarray:
        """Return the decoded image of every stored state of a sample, (N, H, W, 3) or (N, F, H, W, 3) uint8.

        Raises:
            StoreError: the artifact lacks the sample.
            CorruptError: no latents are stored, or a file is damaged.
        """
        return self._decode(arrays_of(self._store, ref, "latents", [sample])[sample])


def lineage_table(chain: Chain) -> pa.Table:
    """Return every stage of the run: epoch, stage, slot, artifact (null: missing), state, why, and inputs."""
    store, rows = chain.store, []
    made = {entry.key: entry for entry in chain.entries()}
    for standing in standings(chain):
        node = standing.node
        entry = made.get((node.epoch, node.stage, node.slot))
        manifest = None if entry is None else store.manifest(entry.ref)
        rows.append(
            {
                **node._asdict(),
                "artifact": None if entry is None else entry.artifact,
                "state": standing.state.value,
                "why": "; ".join(cause.text for cause in standing.causes),
                "inputs": [] if manifest is None else list(manifest.inputs),
            }
        )
    return pa.Table.from_pylist(rows, schema=_LINEAGE)


def figures_table(chain: Chain) -> pa.Table:
    """Return the scores of the run's own evaluations: epoch, list, reward, figure, value."""
    rows = [
        {"epoch": epoch, "list": split, "reward": reward, "figure": figure, "value": value}
        for epoch in evaluated_epochs(chain)
        for split, rewards in evaluation_figures(chain, epoch).items()
        for reward, figures in rewards.items()
        for figure, value in figures.items()
    ]
    return pa.Table.from_pylist(rows, schema=_FIGURES)


def curves_table(chain: Chain) -> pa.Table:
    """Return the points of MLflow's curves: key, step (the epoch; for 'optimize/' the update), value, list."""
    rows = [
        {"key": point.key, "step": point.step, "value": point.value, "list": point.split}
        for point in curve_points(chain)
    ]
    return pa.Table.from_pylist(rows, schema=_CURVES)


def curve_points(chain: Chain) -> list[Point]:
    """Return all values of all curves, epochs before evaluations."""
    points: list[Point] = []
    for epoch in trained_epochs(chain):
        content = epoch_content(chain, epoch)
        points += content.points if content is not None else ()
    for epoch in finished_evaluations(chain):
        evaluation = evaluation_content(chain, epoch)
        points += evaluation.points if evaluation is not None else ()
    return points


def trained_epochs(chain: Chain) -> list[int]:
    """Return the epochs whose training counts."""
    return [n for n in range(1, chain.config.run.epochs + 1) if chain.find(n, "optimize") is not None]


def rolled_out_epochs(chain: Chain) -> list[int]:
    """Return the epochs whose rollout counts."""
    return [n for n in range(1, chain.config.run.epochs + 1) if chain.find(n, "rollout") is not None]


_LINEAGE = pa.schema(
    [
        pa.field("epoch", pa.int32()),
        pa.field("stage", pa.string()),
        pa.field("slot", pa.string()),
        pa.field("artifact", pa.string()),
        pa.field("state", pa.string()),
        pa.field("why", pa.string()),
        pa.field("inputs", pa.list_(pa.string())),
    ]
)
_FIGURES = pa.schema(
    [
        pa.field("epoch", pa.int32()),
        pa.field("list", pa.string()),
        pa.field("reward", pa.string()),
        pa.field("figure", pa.string()),
        pa.field("value", pa.float64()),
    ]
)
_CURVES = pa.schema(
    [
        pa.field("key", pa.string()),
        pa.field("step", pa.int32()),
        pa.field("value", pa.float64()),
        pa.field("list", pa.string()),
    ]
)


def _joined(table: pa.Table, other: pa.Table, columns: dict[str, str]) -> pa.Table:
    """Return a table with columns of another one, joined by sample id."""
    places = pc.index_in(table.column("sample_id"), value_set=other.column("sample_id"))
    for column, name in columns.items():
        table = table.append_column(name, other.column(column).take(places))
    return table
