"""Scores stored images with one reward. Reads stored samples only: no policy is loaded, nothing is sampled."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from configs.errors import StoreError
from configs.rewards import RewardSection
from models.rewards.base import Batch, Needs, Origin, Reward, Scores, perfect_score
from models.rewards.call import Handling, needs_of_made, score
from models.rewards.make import works_on_accelerator
from storage.records import ShardRecord
from storage.tables import write_rows
from tasks.chain import OF, Node
from tasks.components import open_trajectory_store
from tasks.context import RunContext
from tasks.pictures import GRID, grid
from tasks.prompts import SOURCE
from tasks.scores import figures_of, mean_figures, score_summary
from tasks.stage import Output, Shard, Stage
from tasks.stages.rollout import RolloutStage


class _Scoring(Stage):
    """One reward over one artifact of samples, shard by shard."""

    kind = "rewards"
    separable = True

    section: RewardSection
    """The reward."""

    @property
    def on_ranks(self) -> bool:
        """True for a reward that works on the accelerator of this process."""
        return works_on_accelerator(self.section)

    def options(self) -> Mapping[str, Any]:
        """The reward and its options; the weight belongs to the advantages."""
        clips = {"frames": self.section.frames} if self.config.model.frames > 1 else {}
        worst = {} if self.section.over_frames == "mean" else {"over_frames": self.section.over_frames}
        some = {"sources": list(self.section.sources)} if self.section.sources else {}
        return {"reward": self.section.name, "options": self.section.options, **clips, **worst, **some}

    def shards(self) -> list[Shard]:
        """The shards of the samples."""
        return [Shard(name) for name, _, _ in self.context.store.require(self.inputs()[0]).shards]

    def run(self, shard: Shard, folder: Path) -> Output:
        """Score the images of one shard."""
        reward = self.host.reward(self.section)
        batch, table = self._read(shard, needs_of_made(reward))
        scores = self._score(reward, batch)
        columns = {
            **{name: table.column(name).to_pylist() for name in ("sample_id", "prompt_id", "group_id")},
            "reward": pa.array(scores.values, mask=np.isnan(scores.values)),
            "note": list(scores.notes) if scores.notes is not None else [""] * len(scores.values),
        }
        write_rows("rewards", folder, columns)
        self.scored(shard, batch, scores, folder)
        return Output(rows=len(scores.values), summary=score_summary(batch, scores, perfect_score(reward)))

    def _score(self, reward: Reward, batch: Batch) -> Scores:
        """Score the samples the reward is for; the others have no score and no remark."""
        wanted = self.section.sources
        rows = [row for row, about in enumerate(batch.metadata) if not wanted or about[SOURCE] in wanted]
        if len(rows) == len(batch):
            return score(reward, self.section.slot, batch, Handling.of(self.section))
        values, notes = np.full(len(batch), np.nan, np.float32), [""] * len(batch)
        if rows:
            found = score(reward, self.section.slot, batch.take(rows), Handling.of(self.section))
            values[rows] = found.values
            for row, note in zip(rows, found.notes or [""] * len(rows), strict=True):
                notes[row] = note
        return Scores(values, notes)

    def scored(self, shard: Shard, batch: Batch, scores: Scores, folder: Path) -> None:
        """Do what else is to be done with scored samples."""

    def _read(self, shard: Shard, needs: Needs) -> tuple[Batch, pa.Table]:
        """Return the samples of a shard as the reward needs them, and their table."""
        store, ref = self.context.store, self.inputs()[0]
        record = store.record(ref, shard.name)
        if record is None:
            raise StoreError(f"Shard {shard.name} of {ref} is not committed; it cannot be scored yet.")
        opened = open_trajectory_store(self.config.rollout.store).open(store.files(ref, record))
        table = opened.table
        if needs.media == "latents":
            media = [opened.final_latents(row) for row in range(table.num_rows)]
        else:
            recent = self.context.recent.find(ref, shard.name, table.num_rows)
            media = recent or [opened.media(row) for row in range(table.num_rows)]
        samples = table.column("sample_id").to_pylist()
        batch = Batch(
            media=np.stack(media),
            prompts=table.column("prompt").to_pylist(),
            metadata=[json.loads(text) for text in table.column("metadata").to_pylist()],
            groups=table.column("group_id").to_pylist(),
            origin=Origin(samples=samples, shard=f"{shard.name} of {ref}"),
        )
        return batch, table


class ScoreStage(_Scoring):
    """A reward over the trajectories of an epoch; shards may be scored while others are rolled out."""

    name = "score"

    def __init__(self, context: RunContext, epoch: int, slot: str) -> None:
        """Bind to a reward of the config.

        Raises:
            ConfigError: the config has no such reward.
        """
        super().__init__(context, epoch)
        self.slot = slot
        self.section = context.reward_section(slot)
        self._followed: RolloutStage | None = None

    def upstream(self) -> tuple[Node, ...]:
        """The trajectories."""
        return (Node(self.epoch, "rollout"),)

    def follow(self, rollout: RolloutStage) -> None:
        """Read trajectories that may still be in the making."""
        self.adopt(self.ref, (rollout.ref,))
        self._followed = rollout

    def shards(self) -> list[Shard]:
        """The shards of the trajectories; of unfinished ones as they are planned."""
        if self._followed is not None:
            return self._followed.shards()
        (trajectories,) = self.inputs()
        if self.context.store.manifest(trajectories) is not None:
            return super().shards()
        rollout = RolloutStage(self.context, self.epoch)
        rollout.adopt(trajectories, ())
        return rollout.shards()

    def scored(self, shard: Shard, batch: Batch, scores: Scores, folder: Path) -> None:
        """Say how good the rollouts are, by what is optimized."""
        found = figures_of(scores.values, None)
        if "mean" in found and self.section in self.config.rewards:
            self.context.reporter.progress(self.name, self.epoch, 1, 1, f"{self.slot} {found['mean']:.3f}")

    def summarize(self, records: Sequence[ShardRecord]) -> Mapping[str, Any]:
        """Average over all shards."""
        return mean_figures([(record.rows, record.summary) for record in records])


class JudgeStage(_Scoring):
    """A reward or judge over the images of an evaluation; each prompt list is a shard, with a grid to look at."""

    name = "judge"

    def __init__(self, context: RunContext, epoch: int, slot: str) -> None:
        """Bind to a reward or judge of the config, and to the run's evaluation or, after an @, one of its own name.

        Raises:
            ConfigError: the config has no such reward or judge.
        """
        super().__init__(context, epoch)
        self.slot = slot
        reward, _, self.evaluation = slot.partition(OF)
        self.section = context.reward_section(reward, judges=True)

    def options(self) -> Mapping[str, Any]:
        """The reward, and how many images its grid shows."""
        return {**super().options(), "images": self.config.evaluate.images}

    def upstream(self) -> tuple[Node, ...]:
        """The evaluation."""
        return (Node(self.epoch, "evaluate", self.evaluation),)

    def scored(self, shard: Shard, batch: Batch, scores: Scores, folder: Path) -> None:
        """Draw the first images with prompt, what the reward read, and score."""
        count = min(self.config.evaluate.images, len(scores.values))
        if count == 0 or batch.media.dtype != np.uint8:
            return
        notes = scores.notes if scores.notes is not None else [""] * count
        given = ["" if np.isnan(value) else f"{value:.2f}" for value in scores.values[:count]]
        captions = [(batch.prompts[i], f"{notes[i]} {given[i]}".strip()) for i in range(count)]
        grid(list(batch.media[:count]), captions).save(folder / GRID)

    def summarize(self, records: Sequence[ShardRecord]) -> Mapping[str, Any]:
        """Figures by prompt list."""
        return {record.shard: mean_figures([(record.rows, record.summary)]) for record in records}
