"""Scores stored images with one reward. Reads trajectories only: no policy is loaded, nothing is sampled."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from configs.errors import StoreError
from models.rewards.base import perfect_score, score
from storage.layout import ArtifactRef
from storage.records import ShardRecord
from storage.schema import REWARDS, write_table
from tasks.rollout import RolloutStage, open_trajectory_store
from tasks.stage import Output, Shard, Stage
from tasks.workspace import Workspace

_COLUMNS = ("sample_id", "prompt_id", "group_id", "prompt", "metadata")


class ScoreStage(Stage):
    """One reward over one trajectories artifact, shard by shard; shards may be scored while others are rolled out."""

    name = "score"
    kind = "rewards"

    def __init__(self, workspace: Workspace, epoch: int, slot: str, rollout: RolloutStage | None = None) -> None:
        """Bind to a reward of the config.

        Args:
            workspace: the run.
            epoch: the epoch.
            slot: label of the reward.
            rollout: the rollout in progress; the finished one of the lineage when absent.

        Raises:
            ConfigError: the config has no such reward.
        """
        super().__init__(workspace, epoch)
        self.slot = slot
        self.section = workspace.reward_section(slot)
        self._rollout = rollout

    def options(self) -> Mapping[str, Any]:
        """The reward and its options; the weight belongs to the advantages."""
        clips = {"frames": self.section.frames} if self.config.model.frames > 1 else {}
        return {"reward": self.section.name, "options": self.section.options, **clips}

    def inputs(self) -> tuple[ArtifactRef, ...]:
        """The trajectories."""
        if self._rollout is not None:
            return (self._rollout.ref,)
        return (self.workspace.run.require(self.epoch, "rollout").ref,)

    def shards(self) -> list[Shard]:
        """The shards of the trajectories."""
        if self._rollout is not None:
            return self._rollout.shards()
        return [Shard(name) for name, _, _ in self.workspace.store.require(self.inputs()[0]).shards]

    def run(self, shard: Shard, folder: Path) -> Output:
        """Score the images of one shard."""
        samples = self._read(shard)
        reward = self.workspace.reward(self.section)
        metadata = [json.loads(text) for text in samples["metadata"]]
        frames = self.section.frames
        scores = score(reward, self.slot, samples["media"], samples["prompt"], metadata, frames=frames)
        columns = {
            "sample_id": samples["sample_id"],
            "prompt_id": samples["prompt_id"],
            "group_id": samples["group_id"],
            "reward": scores.values,
            "note": list(scores.notes) if scores.notes is not None else [""] * len(scores.values),
        }
        write_table(folder / "rewards.parquet", columns, REWARDS)
        exact = int((scores.values >= perfect_score(reward)).sum())
        mean = float(scores.values.mean(dtype=np.float64))
        self.workspace.reporter.progress(self.name, self.epoch, 1, 1, f"{self.slot} {mean:.3f}")
        return Output(rows=len(scores.values), summary={"mean": mean, "exact": exact})

    def summarize(self, records: Sequence[ShardRecord]) -> Mapping[str, Any]:
        """Average over all shards."""
        rows = sum(record.rows for record in records)
        mean = sum(record.summary["mean"] * record.rows for record in records) / rows
        return {"mean": mean, "exact": sum(record.summary["exact"] for record in records) / rows}

    def _read(self, shard: Shard) -> dict[str, Any]:
        store, ref = self.workspace.store, self.inputs()[0]
        record = store.record(ref, shard.name)
        if record is None:
            raise StoreError(f"Shard {shard.name} of {ref} is not committed; it cannot be scored yet.")
        opened = open_trajectory_store(self.config.rollout.store).open(store.files(ref, record))
        columns = {name: opened.table.column(name).to_pylist() for name in _COLUMNS}
        return {**columns, "media": np.stack([opened.media(row) for row in range(opened.table.num_rows)])}
