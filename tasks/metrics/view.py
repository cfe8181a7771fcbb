"""The read model of a run: epochs, evaluations, samples and costs as Arrow tables.

Commands, reports, the explorer, model cards and the Python API render these. Everything is read on request;
nothing is written.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from flowmill.configs.errors import StoreError
from flowmill.storage.layout import ArtifactRef
from flowmill.storage.trajectories.base import TrajectoryShard
from flowmill.storage.trajectories.tables import read_rows
from flowmill.tasks.inputs.renderer import image_name, sample_name, turn_in
from flowmill.tasks.metrics.evaluations import (
    Figures,
    evaluated_epochs,
    evaluation_figures,
    finished_evaluations,
    flat,
    split_of,
)
from flowmill.tasks.metrics.ingested import IngestedFigures, ingested_figures
from flowmill.tasks.metrics.samples import artifact_table, film_of, ids_of, joined, media_in, rows_of
from flowmill.tasks.metrics.speed import seconds_of
from flowmill.tasks.metrics.tracked import epoch_content, evaluation_content
from flowmill.tasks.runs.chain import Chain
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runs.staleness import statuses
from flowmill.tasks.specs.graph import Node
from flowmill.tasks.specs.turns import last_turn, turn_nodes, turns_of

#: Columns that say which sample a score is of.
_IDS = ("sample_id", "prompt_id", "group_id")


class RunView:
    """The committed results of a run. Epoch 0 is before training.

    The methods raise NotCommittedError if an artifact they need is missing, and CorruptError if a file is damaged.
    """

    def __init__(self, context: RunContext) -> None:
        self.context, self.config, self.store = context, context.config, context.store

    @property
    def chain(self) -> Chain:
        """The artifacts that count."""
        return self.context.chain

    # Epochs and evaluations

    @property
    def trained(self) -> list[int]:
        """Epochs whose training counts."""
        return self._with("optimize")

    @property
    def rolled_out(self) -> list[int]:
        """Epochs whose samples count."""
        return self._with("advantage" if self.chain.plan.has_data else "rollout")

    def _with(self, stage: str) -> list[int]:
        return [n for n in range(1, self.config.run.epochs + 1) if self.chain.find(n, stage) is not None]

    @property
    def evaluations(self) -> dict[int, Figures]:
        """The scores of each evaluation that is up to date, by epoch."""
        return {epoch: evaluation_figures(self.chain, epoch) for epoch in evaluated_epochs(self.chain)}

    def figures(self) -> pa.Table:
        """Return the scores of the run's own evaluations: epoch, list (of prompts), reward, figure, value."""
        rows = [(epoch, *name, value) for epoch, each in self.evaluations.items() for name, value in flat(each).items()]
        return _table(rows, epoch="int32", list="string", reward="string", figure="string", value="float64")

    def curves(self) -> pa.Table:
        """Return the points of MLflow's curves: key, step (the epoch; for 'optimize/' the update), value, list."""
        chain = self.chain
        epochs = [epoch_content(chain, epoch) for epoch in self.trained]
        evaluations = [evaluation_content(chain, epoch) for epoch in finished_evaluations(chain)]
        points = [point for each in (*epochs, *evaluations) if each is not None for point in each.points]
        rows = [(point.key, point.step, point.value, point.split) for point in points]
        return _table(rows, key="string", step="int32", value="float64", list="string")

    # Artifacts

    def lineage(self) -> pa.Table:
        """Return every stage: epoch, stage, slot, artifact (null: missing), state, why, and inputs."""
        entries = {entry.key: entry for entry in self.chain.entries()}
        rows = []
        for status in statuses(self.chain):
            entry = entries.get(status.node)
            manifest = None if entry is None else self.store.manifest(entry.ref)
            why = "; ".join(cause.text for cause in status.causes)
            inputs = [] if manifest is None else list(manifest.inputs)
            artifact = None if entry is None else entry.artifact
            rows.append((*status.node, artifact, status.state.value, why, inputs))
        texts = dict.fromkeys(("stage", "slot", "artifact", "state", "why"), "string")
        return _table(rows, epoch="int32", **texts, inputs=pa.list_(pa.string()))

    def costs(self) -> pa.Table:
        """Return every artifact that counts: epoch, stage, slot, seconds of work over all processes, size in bytes."""
        pairs = [(entry, self.store.manifest(entry.ref)) for entry in self.chain.entries()]
        rows = [
            (*entry.key, seconds_of(self.chain, entry.ref), manifest.size)
            for entry, manifest in pairs
            if manifest is not None
        ]
        return _table(rows, epoch="int32", stage="string", slot="string", seconds="float64", size="int64")

    def summaries(self, stage: str) -> Iterator[tuple[int, str, dict[str, Any]]]:
        """Yield epoch, slot and figures of each artifact of a stage that counts."""
        for entry in self.chain.entries():
            manifest = self.store.manifest(entry.ref) if entry.stage == stage else None
            if manifest is not None:
                yield entry.epoch, entry.slot, dict(manifest.summary)

    def ingested(self) -> IngestedFigures | None:
        """Return the figures of the ingested samples; None without any, or before they are ingested."""
        ref = None if self.config.data is None else self._complete(self.chain.plan.samples_of(0))
        if ref is None or self.config.data is None:
            return None
        return ingested_figures(self.store, ref, self.config.data)

    # Samples

    def scores(self, epoch: int, *, evaluation: bool = False) -> pa.Table:
        """Return the scores of an epoch's samples, as far as these are committed; without any, no rows.

        Columns: sample_id, prompt_id, group_id; of an evaluation 'list', the prompt list; 'reward.<label>' and
        'note.<label>' of each reward, and of each monitor or judge; after the advantage stage 'reward' (the optimized
        sum) and 'advantage'.

        Args:
            evaluation: the run's evaluation of the epoch, not its rollout.
        """
        stage, scored = "score", self.config.scored
        if evaluation:
            stage, scored = "judge", (*self.config.rewards, *self.config.evaluate.judges)
        nodes = {section.slot: Node(epoch, stage, section.slot) for section in scored}
        parts = [(node, {"reward": f"reward.{slot}", "note": f"note.{slot}"}) for slot, node in nodes.items()]
        parts += [] if evaluation else [(Node(epoch, "advantage"), {"reward": "reward", "advantage": "advantage"})]
        table = pa.table({name: pa.array([], pa.string()) for name in _IDS})
        for node, columns in parts:
            ref = self._complete(node)
            if ref is not None:
                rows = read_rows(self.store, ref)
                if not table.num_rows:
                    table = self._with_list(rows.select(_IDS), ref) if evaluation else rows.select(_IDS)
                table = joined(table, rows, columns)
        return table

    def _complete(self, node: Node) -> ArtifactRef | None:
        """Return the artifact of a stage if it counts and is complete."""
        entry = self.chain.find(*node)
        return None if entry is None or self.store.manifest(entry.ref) is None else entry.ref

    def _with_list(self, table: pa.Table, ref: ArtifactRef) -> pa.Table:
        lists = [split_of(record.shard) for record in self.store.shards(ref) for _ in range(record.rows)]
        return table.append_column("list", pa.array(lists, pa.string()))

    def samples(self, epoch: int, *, evaluation: bool = False) -> pa.Table:
        """Return the samples of an epoch with their ``scores``; notes only of rewards that left any.

        Of a rollout also the lists of advantages per token, where the run has them. For rendered texts
        'media_format' is the format of their images.

        Args:
            evaluation: the samples of the run's evaluation, not of its rollout.
        """
        drawn, plan = "depict" if evaluation else "render", self.chain.plan
        ref = self.chain.require(*plan.samples_of(epoch, evaluation=evaluation)).ref
        table, scores = artifact_table(self.store, ref), self.scores(epoch, evaluation=evaluation)
        if plan.has_data and not evaluation:
            # An epoch trains on some of the ingested samples. Imported late: status needs no Arrow.
            import pyarrow.compute as pc

            table = table.filter(pc.is_in(table["sample_id"], value_set=scores["sample_id"].combine_chunks()))
            table = self._as_trained(table, scores)
        table = self._with_list(table, ref) if evaluation else table
        if self.config.render is not None and self.chain.find(epoch, drawn) is not None:
            formats = pa.array(["png"] * table.num_rows, pa.string())
            table = table.set_column(table.column_names.index("media_format"), "media_format", formats)
        plain = [name for name in scores.column_names if name not in (*_IDS, "list") and not name.startswith("note.")]
        notes = [name for name in scores.column_names if name.startswith("note.") and any(scores[name].to_pylist())]
        table = joined(table, scores, {name: name for name in plain})
        advantages = None if evaluation else self._complete(Node(epoch, "advantage"))
        if advantages is not None and plan.estimator.per_token:
            part = read_rows(self.store, advantages, "token_advantages")
            table = joined(table, part, {column: column for column in part.column_names[1:]})
        return joined(table, scores, {name: name for name in notes})

    def _as_trained(self, table: pa.Table, scores: pa.Table) -> pa.Table:
        """Return samples of data with the prompts of an epoch, which draws one of several captions, or none."""
        if self.config.data is None or not self.config.data.variants:
            return table
        trained = dict(zip(*(scores[name].to_pylist() for name in ("sample_id", "prompt_id")), strict=True))
        ids = [trained[name] for name in table["sample_id"].to_pylist()]
        texts = {each.id: each.text for each in self.context.prompts_by_id.values()}
        for name, values in {"prompt_id": ids, "prompt": [texts[each] for each in ids]}.items():
            table = table.set_column(
                table.column_names.index(name), table.schema.field(name), pa.array(values, pa.string())
            )
        return table

    def turns(self, epoch: int, *, evaluation: bool = False) -> pa.Table:
        """Return every turn of an epoch's samples, in runs with ``render.turns``.

        Columns: sample_id; turn, from 1; text; note and reward, the remark and score that a next turn reads.

        Args:
            evaluation: the samples of the run's evaluation, not of its rollout.
        """
        if turns_of(self.config) is None:
            raise StoreError(f"Run '{self.config.run.name}' has no turns: its config has no render.turns.")
        rows: dict[str, list[tuple[Any, ...]]] = {}
        for number in range(1, last_turn(self.config) + 1):
            nodes, said = turn_nodes(self.config, epoch, number, evaluation=evaluation), dict[str, dict[str, Any]]()
            if number < last_turn(self.config):
                scores = read_rows(self.store, self.chain.require(*nodes.comment).ref)
                said = {row["sample_id"]: row for row in scores.to_pylist()}
            for row in artifact_table(self.store, self.chain.require(*nodes.texts).ref).to_pylist():
                name = row["sample_id"]
                if turn_in(json.loads(row["metadata"])) == number:
                    remark = [said[name][column] if name in said else None for column in ("note", "reward")]
                    rows.setdefault(name, []).append((name, number, row["text"], *remark))
        types = {"sample_id": "string", "turn": "int32", "text": "string", "note": "string", "reward": "float32"}
        return _table([row for turns in rows.values() for row in turns], **types)

    def shown(
        self, epoch: int, samples: Collection[str] | None = None, *, evaluation: bool = False
    ) -> Iterator[tuple[str, TrajectoryShard, int]]:
        """Yield id, opened shard and row of the image or clip of each sample, of each image of a rendered text.

        Args:
            samples: ids; all when None.
            evaluation: samples of the run's evaluation, not of its rollout.
        """
        node = self.chain.plan.media_of(epoch, evaluation=evaluation)
        count = 1 if self.config.render is None else self.config.render.images
        ref = self.chain.require(*node).ref
        ids = None if samples is None else ids_of(samples)
        requested = None if ids is None else {image_name(each, n, of=count) for each in ids for n in range(count)}
        for name, shard, row in rows_of(self.store, ref, requested):
            yield name if count == 1 else sample_name(name), shard, row

    def pictures(
        self, epoch: int, samples: Collection[str] | None = None, *, evaluation: bool = False
    ) -> dict[str, np.ndarray]:
        """Return the images, (H, W, 3) uint8, or clips, (F, H, W, 3) uint8, of ``shown`` samples by id.

        With K > 1 images per rendered text (K, H, W, 3).
        """
        pictures: dict[str, list[np.ndarray]] = {}
        for sample, shard, row in self.shown(epoch, samples, evaluation=evaluation):
            pictures.setdefault(sample, []).append(media_in(sample, shard, row))
        several = self.config.render is not None and self.config.render.images > 1
        return {sample: np.stack(media) if several else media[0] for sample, media in pictures.items()}

    def films(
        self, epoch: int, samples: Collection[str] | None = None, *, evaluation: bool = False
    ) -> dict[str, bytes]:
        """Return mp4 files of the ``shown`` samples that have sound, by id."""
        fps, rows = self.config.rollout.media.fps, self.shown(epoch, samples, evaluation=evaluation)
        films = {sample: film_of(shard, row, fps=fps) for sample, shard, row in rows}
        return {sample: film for sample, film in films.items() if film is not None}

    def references(
        self, epoch: int, samples: Collection[str], *, evaluation: bool = False
    ) -> dict[str, list[np.ndarray]]:
        """Return the input images of the samples' prompts, (H, W, 3) uint8 each, by sample id.

        The lists are empty if the prompts have no input images, or if an older version did not store them.
        """
        if not self.context.holds_references:
            return {sample: [] for sample in ids_of(samples)}
        ref = self.chain.require(*self.chain.plan.samples_of(epoch, evaluation=evaluation)).ref
        rows = list(rows_of(self.store, ref, samples))
        metadata = [json.loads(shard.table.column("metadata")[row].as_py()) for _, shard, row in rows]
        return dict(zip([sample for sample, _, _ in rows], self.context.references(metadata), strict=True))


def _table(rows: list[tuple[Any, ...]], **types: pa.DataType | str) -> pa.Table:
    schema = pa.schema(types)
    return pa.Table.from_pylist([dict(zip(types, row, strict=True)) for row in rows], schema=schema)
