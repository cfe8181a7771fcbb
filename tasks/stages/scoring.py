"""Scores stored samples with one reward. Reads stored samples only: no policy is loaded, nothing is sampled."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from flowmill.configs.fingerprint import canonical_json
from flowmill.configs.rewards import RewardSection
from flowmill.models.rewards.base import Batch, Needs, Origin, Reward, Scores, joined, perfect_score
from flowmill.models.rewards.factory import needs_of, scored_by_ranks, works_on_accelerator
from flowmill.models.rewards.invocation import Handling, declared_needs, score
from flowmill.storage.artifacts.row_digest import Contents
from flowmill.storage.trajectories.tables import write_rows
from flowmill.tasks.inputs.option_paths import OptionPath, reward_places
from flowmill.tasks.inputs.prompts import SOURCE
from flowmill.tasks.inputs.renderer import reads_images, render_of, turn_in
from flowmill.tasks.inputs.weight_sources import origin_of
from flowmill.tasks.metrics.scores import score_summary
from flowmill.tasks.modalities.modality import SampleGeneration
from flowmill.tasks.stages.stage import Output, Shard, Stage


class Scoring(Stage):
    """One reward over one artifact of samples, shard by shard."""

    separable = True
    section: RewardSection
    earlier: str = ""
    """The slot of a turn before the last, whose new images alone are scored for comments; empty for the last."""
    _wholes: Mapping[str, list[str]] = {}

    def options(self) -> Mapping[str, Any]:
        """The reward and its options; the weight belongs to the advantages."""
        return self._reward_options()

    def _reward_options(self) -> dict[str, Any]:
        # Of a clip of one frame, only the choice of the whole clip makes a difference.
        chosen = self.config.model.frames > 1 or self.section.frames == "clip"
        clips = {"frames": self.section.frames} if chosen else {}
        some = {"sources": list(self.section.sources)} if self.section.sources else {}
        new = {"turn": self.turn} if self.earlier else {}
        return {"reward": self.section.name, "options": self.section.options, **clips, **some, **new}

    def places(self) -> tuple[OptionPath, ...]:
        """Files of the reward; a server that scores in its place must read the same."""
        return reward_places(self.section)

    def labels(self) -> Mapping[str, str]:
        """Return name and options of the reward, independent of its label in the run."""
        others = {name: value for name, value in self._reward_options().items() if name != "reward" and value != {}}
        return {"reward_name": self.section.name, "reward_options": canonical_json(others)}

    @property
    def sizes(self) -> Mapping[str, int | None]:
        return {"batch_size": self.section.batch_size}

    @property
    def needs_accelerator(self) -> bool:
        """True for a reward that works on the accelerator of the process that scores."""
        return works_on_accelerator(self.section)

    @property
    def on_ranks(self) -> bool:
        """True for a reward on an accelerator, and where there are several machines, whose cores all score."""
        return scored_by_ranks(self.section, nodes=self.config.execution.nodes)

    def shards(self) -> list[Shard]:
        """The shards of the samples, or several of them as one where a reward compares samples of a group."""
        names = self.sampled()
        self._wholes = self.whole(names) if self.needs().groupwise else {}
        return [Shard(name) for name in self._wholes or names]

    def parts_of(self, shard: Shard) -> list[str]:
        """Return the shards of samples that are scored as one."""
        if not self.needs().groupwise:
            return [shard.name]
        if shard.name not in self._wholes:
            self._wholes = self.whole(self.sampled())
        return self._wholes[shard.name]

    def sampled(self) -> list[str]:
        """Return the names of all shards of the samples, in order."""
        return [name for name, _, _ in self.context.store.require(self.inputs()[0]).shards]

    def whole(self, names: Sequence[str]) -> dict[str, list[str]]:
        """Return shards that hold whole groups, by name, and the shards of samples that each consists of."""
        return {name: [name] for name in names}

    def needs(self) -> Needs:
        """Return the reward's needs without loading it; a server reports its own."""
        section = self.section
        if section.server is None:
            return needs_of(section.name, section.options)
        return declared_needs(self.host.rewards.of(section))

    def run(self, shard: Shard, folder: Path) -> Output:
        reward = self.host.rewards.of(self.section)
        batch, table = self.read(shard, declared_needs(reward))
        with self.host.rewards.at_work(reward):
            scores = self._score(reward, batch)
        self.scored(shard, batch, scores, folder)
        batch, scores, table = self._of_samples(shard, batch, scores, table)
        columns = {
            **{name: table.column(name).to_pylist() for name in ("sample_id", "prompt_id", "group_id")},
            "reward": pa.array(scores.values, mask=np.isnan(scores.values)),
            "note": list(scores.notes) if scores.notes is not None else [""] * len(scores.values),
        }
        self.write(folder, columns)
        rows = {**columns, "reward": scores.values.tolist()}
        summary = score_summary(batch, scores, perfect_score(reward))
        return Output(rows=len(scores.values), summary=summary, content=lambda: _content(rows))

    def write(self, folder: Path, columns: Mapping[str, Sequence[Any]]) -> None:
        """Write the scores of samples, with columns that identify reward and artifact."""
        write_rows("rewards", folder, columns, {**self.labels(), "artifact": str(self.inputs()[0])})

    def _score(self, reward: Reward, batch: Batch) -> Scores:
        """Score the samples the reward is for; the others have no score and no remark."""
        rows = self.requested_rows(batch)
        if len(rows) == len(batch):
            return score(reward, self.section.slot, batch, Handling.of(self.section))
        values, notes = np.full(len(batch), np.nan, np.float32), [""] * len(batch)
        if rows:
            result = score(reward, self.section.slot, batch.take(rows), Handling.of(self.section))
            values[rows] = result.values
            for row, note in zip(rows, result.notes or [""] * len(rows), strict=True):
                notes[row] = note
        return Scores(values, notes)

    def requested_rows(self, batch: Batch) -> list[int]:
        """Return the rows of the samples that the reward is for."""
        sources, numbered = self.section.sources, enumerate(batch.metadata)
        rows = [row for row, metadata in numbered if not sources or metadata[SOURCE] in sources]
        return [row for row in rows if turn_in(batch.metadata[row]) == self.turn] if self.earlier else rows

    def scored(self, shard: Shard, batch: Batch, scores: Scores, folder: Path) -> None:
        """Hook for further work on scored samples."""

    @property
    def reads_images(self) -> bool:
        """Whether the reward scores renders of sampled texts."""
        return reads_images(self.config, self.section)

    @cached_property
    def scored_modality(self) -> SampleGeneration:
        """The modality of scored media: the run's, or the renderer's."""
        modality: SampleGeneration = self.plan.drawer.modality if self.reads_images else self.modality
        return modality

    def _of_samples(
        self, shard: Shard, batch: Batch, scores: Scores, table: pa.Table
    ) -> tuple[Batch, Scores, pa.Table]:
        """Return one row of score and ids per sample; several images of a text give their mean."""
        count = render_of(self.config).images if self.reads_images else 1
        if count == 1:
            return batch, scores, table
        origin = origin_of(self.context.store, self.inputs()[0])
        texts = [self.opened(origin, name).table for name in self.parts_of(shard)]
        rows = range(0, len(batch), count)
        # A sample one of whose images has no score has none.
        values = scores.values.reshape(-1, count).mean(1)
        remarks = scores.notes or [""] * len(batch)
        notes = [", ".join(dict.fromkeys(remarks[row : row + count])) for row in rows]
        return batch.take(rows), Scores(values, notes), pa.concat_tables(texts)

    def read(self, shard: Shard, needs: Needs) -> tuple[Batch, pa.Table]:
        """Return the samples of a shard as the reward needs them, and their table."""
        parts = [self._read(name, needs) for name in self.parts_of(shard)]
        return joined([batch for batch, _ in parts]), pa.concat_tables([table for _, table in parts])

    def _read(self, name: str, needs: Needs) -> tuple[Batch, pa.Table]:
        ref = self.inputs()[0]
        opened = self.opened(ref, name)
        table = opened.table
        recent = self.context.recent.find(ref, name, table.num_rows)
        samples = table.column("sample_id").to_pylist()
        metadata = [json.loads(text) for text in table.column("metadata").to_pylist()]
        batch = Batch(
            media=self.scored_modality.scored(opened, needs, recent),
            prompts=table.column("prompt").to_pylist(),
            metadata=metadata,
            references=self.context.references(metadata) if needs.references else (),
            groups=table.column("group_id").to_pylist(),
            origin=Origin(samples=samples, shard=f"{name} of {ref}"),
        )
        return batch, table


def _content(columns: Mapping[str, Sequence[Any]]) -> str:
    contents = Contents()
    contents.add_table(columns)
    return str(contents)
