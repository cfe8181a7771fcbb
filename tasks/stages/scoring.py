"""Scores stored samples with one reward. Reads stored samples only: no policy is loaded, nothing is sampled."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from configs.errors import StoreError
from configs.rewards import RewardSection
from models.rewards.base import Batch, Needs, Origin, Reward, Scores, perfect_score
from models.rewards.call import Handling, needs_of_made, score
from models.rewards.make import works_on_accelerator
from storage.contents import Contents
from storage.layout import ArtifactRef
from storage.tables import write_rows
from storage.trajectories.base import TrajectoryShard
from tasks.figures.scores import score_summary
from tasks.identities.score import RewardIdentity
from tasks.inputs.components import open_trajectory_store
from tasks.inputs.prompts import SOURCE
from tasks.inputs.renderer import reads_images, render_of, renderer_config
from tasks.inputs.sources import origin_of
from tasks.kinds.kind import Kind, make_kind
from tasks.stages.stage import Output, Shard, Stage


class Scoring(Stage):
    """One reward over one artifact of samples, shard by shard."""

    identity: RewardIdentity
    separable = True

    @property
    def section(self) -> RewardSection:
        """The reward."""
        return self.identity.section

    @property
    def sizes(self) -> Mapping[str, int | None]:
        """Of calls of the reward."""
        return {"batch_size": self.section.batch_size}

    @property
    def needs_accelerator(self) -> bool:
        """True for a reward that works on the accelerator of the process that scores."""
        return works_on_accelerator(self.section)

    @property
    def on_ranks(self) -> bool:
        """True for a reward on an accelerator, and where there are several machines, whose cores all score."""
        several = self.config.execution.nodes > 1 and self.section.server is None
        return self.needs_accelerator or several

    def shards(self) -> list[Shard]:
        """The shards of the samples."""
        return [Shard(name) for name, _, _ in self.context.store.require(self.inputs()[0]).shards]

    def run(self, shard: Shard, folder: Path) -> Output:
        """Score the samples of one shard."""
        reward = self.host.rewards.of(self.section)
        opened = self.opened_shard(shard, self.inputs()[0])
        batch = self.read(shard, opened, needs_of_made(reward))
        with self.host.rewards.at_work(reward):
            scores = self._score(reward, batch)
        self.scored(shard, opened, batch, scores, folder)
        batch, scores, table = self._of_samples(shard, opened, batch, scores)
        columns = {
            **{name: table.column(name).to_pylist() for name in ("sample_id", "prompt_id", "group_id")},
            "reward": pa.array(scores.values, mask=np.isnan(scores.values)),
            "note": list(scores.notes) if scores.notes is not None else [""] * len(scores.values),
        }
        self.write(folder, columns)
        rows = {**columns, "reward": scores.values.tolist()}
        about = score_summary(batch, scores, perfect_score(reward))
        return Output(rows=len(scores.values), summary=about, content=lambda: _content(rows))

    def write(self, folder: Path, columns: Mapping[str, Sequence[Any]]) -> None:
        """Write the scores of samples, with what says which reward gave them, to what."""
        write_rows("rewards", folder, columns, {**self.identity.labels(), "artifact": str(self.inputs()[0])})

    def _score(self, reward: Reward, batch: Batch) -> Scores:
        """Score the samples the reward is for; the others have no score and no remark."""
        rows = self.asked(batch)
        if len(rows) == len(batch):
            return score(reward, self.section.slot, batch, Handling.of(self.section))
        values, notes = np.full(len(batch), np.nan, np.float32), [""] * len(batch)
        if rows:
            found = score(reward, self.section.slot, batch.take(rows), Handling.of(self.section))
            values[rows] = found.values
            for row, note in zip(rows, found.notes or [""] * len(rows), strict=True):
                notes[row] = note
        return Scores(values, notes)

    def asked(self, batch: Batch) -> list[int]:
        """Return the rows of the samples that the reward is for."""
        wanted = self.section.sources
        return [row for row, about in enumerate(batch.metadata) if not wanted or about[SOURCE] in wanted]

    def scored(self, shard: Shard, opened: TrajectoryShard, batch: Batch, scores: Scores, folder: Path) -> None:
        """Do what else is to be done with scored samples."""

    @property
    def reads_images(self) -> bool:
        """Whether what is scored was drawn of the samples, which are texts."""
        return reads_images(self.config, self.section)

    @cached_property
    def scored_kind(self) -> Kind:
        """What knows what is scored: the run's kind, or that of the model that drew it."""
        return make_kind(renderer_config(self.config)) if self.reads_images else self.policy_kind

    def _of_samples(
        self, shard: Shard, opened: TrajectoryShard, batch: Batch, scores: Scores
    ) -> tuple[Batch, Scores, pa.Table]:
        """Return what was scored, scores and ids of one row per sample: of several images of a text the mean."""
        count = render_of(self.config).images if self.reads_images else 1
        if count == 1:
            return batch, scores, opened.table
        texts = self.opened_shard(shard, origin_of(self.context.store, self.inputs()[0])).table
        rows = range(0, len(batch), count)
        # A sample one of whose images has no score has none.
        values = scores.values.reshape(-1, count).mean(1)
        told = scores.notes or [""] * len(batch)
        notes = [", ".join(dict.fromkeys(told[row : row + count])) for row in rows]
        return batch.take(rows), Scores(values, notes), texts

    def opened_shard(self, shard: Shard, ref: ArtifactRef) -> TrajectoryShard:
        """Return a shard of samples.

        Raises:
            StoreError: it is not there.
        """
        store = self.context.store
        record = store.record(ref, shard.name)
        if record is None:
            raise StoreError(f"Shard {shard.name} of {ref} is not committed; it cannot be scored yet.")
        return open_trajectory_store(self.config.rollout.store).open(store.files(ref, record))

    def read(self, shard: Shard, opened: TrajectoryShard, needs: Needs) -> Batch:
        """Return the samples of a shard as the reward needs them."""
        table, ref = opened.table, self.inputs()[0]
        recent = self.context.recent.find(ref, shard.name, table.num_rows)
        samples = table.column("sample_id").to_pylist()
        metadata = [json.loads(text) for text in table.column("metadata").to_pylist()]
        return Batch(
            media=self.scored_kind.scored(opened, needs, recent),
            prompts=table.column("prompt").to_pylist(),
            metadata=metadata,
            references=self.context.references(metadata) if needs.references else (),
            groups=table.column("group_id").to_pylist(),
            origin=Origin(samples=samples, shard=f"{shard.name} of {ref}"),
        )


def _content(columns: Mapping[str, Sequence[Any]]) -> str:
    """Return what the rows are: how many share a shard is a matter of choice."""
    contents = Contents()
    contents.add_table(columns)
    return str(contents)
