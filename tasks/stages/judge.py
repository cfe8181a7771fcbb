"""Scores an evaluation, and writes previews."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from flowmill.models.rewards.base import Batch, Scores, joined
from flowmill.storage.artifacts.records import ShardRecord
from flowmill.storage.artifacts.row_digest import Contents
from flowmill.storage.trajectories.tables import read_shard
from flowmill.tasks.metrics.evaluations import split_of
from flowmill.tasks.metrics.scores import mean_figures
from flowmill.tasks.metrics.texts import Text, write_texts
from flowmill.tasks.specs.graph import OF, Node
from flowmill.tasks.specs.turns import split_turn
from flowmill.tasks.stages.scoring import Scoring
from flowmill.tasks.stages.stage import Output, Shard

#: Ends the name of the shard that shows a split of several.
_SHOWN = "-shown"


class JudgeStage(Scoring):
    """A reward or judge over the samples of an evaluation; some samples of each prompt list are shown."""

    def take_slot(self) -> None:
        """Find the reward or judge, and the run's evaluation or, after an @, a named one."""
        base, self.earlier = split_turn(self.slot)
        reward, _, name = base.partition(OF)
        self.evaluation = name + self.earlier
        self.section = self.facts.reward_section(reward, judges=not self.earlier)

    def options(self) -> Mapping[str, Any]:
        """The reward, and the number of images in its grid."""
        return {**super().options(), "images": self.config.evaluate.images}

    def upstream(self) -> tuple[Node, ...]:
        return (self.plan.judged_by(self.section, self.epoch, self.evaluation),)

    def whole(self, names: Sequence[str]) -> dict[str, list[str]]:
        """Each prompt list as one: its prompts take turns, so groups end where it does."""
        by_split: dict[str, list[str]] = {}
        for name in names:
            by_split.setdefault(split_of(name), []).append(name)
        return by_split

    def closing(self) -> list[Shard]:
        """Return the preview shard of each split with several shards; a single shard holds its own preview."""
        shown = self.config.evaluate.images
        splits = dict.fromkeys(split_of(shard.name) for shard in self.shards() if shard.name != split_of(shard.name))
        return [Shard(f"{split}{_SHOWN}") for split in splits if shown]

    def run(self, shard: Shard, folder: Path) -> Output:
        """Score the samples of one shard, or show the first of a split."""
        if not shard.name.endswith(_SHOWN):
            return super().run(shard, folder)
        self._show(folder, *self._first(split_of(shard.name)))
        self.write(folder, {name: [] for name in ("sample_id", "prompt_id", "group_id", "reward", "note")})
        return Output(rows=0, content=lambda: str(Contents()))

    def scored(self, shard: Shard, batch: Batch, scores: Scores, folder: Path) -> None:
        """Show the first samples of a split that has no other shard."""
        if shard.name == split_of(shard.name):
            count = min(self.config.evaluate.images, len(batch))
            notes = [""] * len(batch) if scores.notes is None else scores.notes
            self._show(folder, batch, self._written(shard, count), _verdicts(scores.values[:count], notes))

    def _show(self, folder: Path, batch: Batch, written: Sequence[str], verdicts: Sequence[str]) -> None:
        """Show samples with prompt, rendered text if there is one, and verdict."""
        if not self.reads_images:
            if self.modality.writes and self.context.holds_references:
                seen = self.context.references(batch.metadata[: len(verdicts)])
                batch = replace(batch, references=seen)
            self.modality.show(folder, batch, verdicts)
            return
        self.scored_modality.show(folder, batch, verdicts, written)
        write_texts(folder, [Text(*each) for each in zip(batch.prompts, written, verdicts, strict=False)])

    def _written(self, shard: Shard, count: int) -> list[str]:
        """Return the texts that the first images of a shard were drawn of."""
        if not self.reads_images:
            return []
        opened = [self.opened(self.inputs()[0], name) for name in self.parts_of(shard)]
        return [each.text(row) or "" for each in opened for row in range(each.table.num_rows)][:count]

    def summarize(self, records: Sequence[ShardRecord]) -> Mapping[str, Any]:
        splits: dict[str, list[tuple[int, Mapping[str, Any]]]] = {}
        for record in records:
            if not record.shard.endswith(_SHOWN):
                splits.setdefault(split_of(record.shard), []).append((record.rows, record.summary))
        return {split: mean_figures(parts) for split, parts in splits.items()}

    def _first(self, split: str) -> tuple[Batch, list[str], list[str]]:
        """Return the first samples of a split, their rendered texts, and the reward's verdicts."""
        batches, written, verdicts, left = list[Batch](), list[str](), list[str](), self.config.evaluate.images
        for shard in self.shards():
            if split_of(shard.name) == split and left:
                batch, _ = self.read(shard, self.needs())
                count = min(left, len(batch))
                batches.append(batch.take(range(count)))
                written += self._written(shard, count)
                (record,) = self.context.store.recorded(self.ref, [shard.name])
                table = read_shard(self.context.store, self.ref, record)
                # Of several images of a text each is shown with the score of the text.
                rows = [row * table.num_rows // len(batch) for row in range(count)]
                said = table.take(rows)
                verdicts += _verdicts(said.column("reward").to_numpy(), said.column("note").to_pylist())
                left -= count
        return joined(batches), written, verdicts


def _verdicts(values: np.ndarray, notes: Sequence[str]) -> list[str]:
    """Return verdicts of samples: the reward's remark, and the score if there is one."""
    scores = ["" if np.isnan(value) else f"{value:.2f}" for value in values]
    return [f"{note} {value}".strip() for note, value in zip(notes, scores, strict=False)]
