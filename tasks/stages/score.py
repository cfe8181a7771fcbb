"""Scores stored images with one reward. Reads stored samples only: no policy is loaded, nothing is sampled."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from configs.errors import StoreError
from configs.schema import RewardSection
from models.rewards.base import Origin, Scores, perfect_score, score
from models.rewards.make import works_on_accelerator
from storage.layout import ArtifactRef
from storage.records import ShardRecord
from storage.schema import REWARDS as COLUMNS
from storage.schema import write_table
from tasks.chain import OF, Node
from tasks.components import open_trajectory_store
from tasks.context import RunContext
from tasks.pictures import GRID, grid
from tasks.stage import Output, Shard, Stage
from tasks.stages.rollout import RolloutStage

_COLUMNS = ("sample_id", "prompt_id", "group_id", "prompt", "metadata")


class _Scoring(Stage):
    """One reward over one artifact of samples, shard by shard."""

    kind = "rewards"
    separable = True

    section: RewardSection
    """The reward."""

    @property
    def on_ranks(self) -> bool:
        """True for a reward that says it works on the accelerator."""
        return works_on_accelerator(self.section.name)

    def options(self) -> Mapping[str, Any]:
        """The reward and its options; the weight belongs to the advantages."""
        clips = {"frames": self.section.frames} if self.config.model.frames > 1 else {}
        worst = {} if self.section.over_frames == "mean" else {"over_frames": self.section.over_frames}
        return {"reward": self.section.name, "options": self.section.options, **clips, **worst}

    def shards(self) -> list[Shard]:
        """The shards of the samples."""
        return [Shard(name) for name, _, _ in self.context.store.require(self.inputs()[0]).shards]

    def run(self, shard: Shard, folder: Path) -> Output:
        """Score the images of one shard."""
        samples = self._read(shard)
        reward = self.host.reward(self.section)
        metadata = [json.loads(text) for text in samples["metadata"]]
        of_clips: dict[str, Any] = {"frames": self.section.frames, "over_frames": self.section.over_frames}
        origin = Origin(samples=samples["sample_id"], shard=f"{shard.name} of {self.inputs()[0]}")
        media, prompts = samples["media"], samples["prompt"]
        scores = score(reward, self.section.slot, media, prompts, metadata, **of_clips, origin=origin)
        columns = {
            "sample_id": samples["sample_id"],
            "prompt_id": samples["prompt_id"],
            "group_id": samples["group_id"],
            "reward": scores.values,
            "note": list(scores.notes) if scores.notes is not None else [""] * len(scores.values),
        }
        write_table(folder / "rewards.parquet", columns, COLUMNS)
        summary = {"mean": float(scores.values.mean(dtype=np.float64))}
        perfect = perfect_score(reward)
        if perfect is not None:
            summary["exact"] = int((scores.values >= perfect).sum())
        self.scored(shard, samples, scores, folder)
        return Output(rows=len(scores.values), summary=summary)

    def scored(self, shard: Shard, samples: Mapping[str, Any], scores: Scores, folder: Path) -> None:
        """Do what else is to be done with scored samples."""

    def _read(self, shard: Shard) -> dict[str, Any]:
        store, ref = self.context.store, self.inputs()[0]
        record = store.record(ref, shard.name)
        if record is None:
            raise StoreError(f"Shard {shard.name} of {ref} is not committed; it cannot be scored yet.")
        opened = open_trajectory_store(self.config.rollout.store).open(store.files(ref, record))
        columns = {name: opened.table.column(name).to_pylist() for name in _COLUMNS}
        return {**columns, "media": np.stack([opened.media(row) for row in range(opened.table.num_rows)])}


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

    def upstream(self) -> tuple[Node, ...]:
        """The trajectories."""
        return (Node(self.epoch, "rollout"),)

    def follow(self, trajectories: ArtifactRef) -> None:
        """Read trajectories that may still be in the making."""
        self.adopt(self.ref, (trajectories,))

    def shards(self) -> list[Shard]:
        """The shards of the trajectories; of unfinished ones as they are planned."""
        (trajectories,) = self.inputs()
        if self.context.store.manifest(trajectories) is not None:
            return super().shards()
        rollout = RolloutStage(self.context, self.epoch)
        rollout.adopt(trajectories, ())
        return rollout.shards()

    def scored(self, shard: Shard, samples: Mapping[str, Any], scores: Scores, folder: Path) -> None:
        """Say how good the rollouts are."""
        mean = float(scores.values.mean(dtype=np.float64))
        self.context.reporter.progress(self.name, self.epoch, 1, 1, f"{self.slot} {mean:.3f}")

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

    def scored(self, shard: Shard, samples: Mapping[str, Any], scores: Scores, folder: Path) -> None:
        """Draw the first images with prompt, what the reward read, and score."""
        count = min(self.config.evaluate.images, len(scores.values))
        if count == 0:
            return
        notes = scores.notes if scores.notes is not None else [""] * count
        captions = [(samples["prompt"][i], f"{notes[i]} {scores.values[i]:.2f}".strip()) for i in range(count)]
        grid(list(samples["media"][:count]), captions).save(folder / GRID)

    def summarize(self, records: Sequence[ShardRecord]) -> Mapping[str, Any]:
        """Figures by prompt list."""
        return {record.shard: mean_figures([(record.rows, record.summary)]) for record in records}


def mean_figures(parts: Sequence[tuple[int, Mapping[str, Any]]]) -> dict[str, float]:
    """Return the mean score of (rows, summary) parts, and the share of perfect ones where the reward knows them."""
    rows = sum(count for count, _ in parts)
    figures = {"mean": sum(summary["mean"] * count for count, summary in parts) / rows}
    if all("exact" in summary for _, summary in parts):
        figures["exact"] = sum(summary["exact"] for _, summary in parts) / rows
    return figures
