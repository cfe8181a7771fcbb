"""Joins the rewards of an epoch into one advantage per sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from configs.errors import CorruptError
from storage.commit import ArtifactStore, ShardRecord
from storage.layout import ArtifactRef
from storage.schema import ADVANTAGES, REWARDS, read_table, write_table
from tasks.algorithms.advantages import group_advantages, group_statistics
from tasks.stage import Output, Shard, Stage


class AdvantageStage(Stage):
    """The weighted sum of rewards, normalized within groups."""

    name = "advantage"
    kind = "advantages"

    def options(self) -> Mapping[str, Any]:
        """Weights in the order of the inputs, and the normalization."""
        weights = [section.weight for section in self.config.rewards]
        return {"advantage": self.config.advantage.model_dump(mode="json"), "weights": weights}

    def inputs(self) -> tuple[ArtifactRef, ...]:
        """The rewards."""
        run = self.workspace.run
        return tuple(run.require(self.epoch, "score", section.slot).ref for section in self.config.rewards)

    def shards(self) -> list[Shard]:
        """One: statistics are over the whole epoch."""
        return [Shard("advantages")]

    def run(self, shard: Shard, folder: Path) -> Output:
        """Compute and write the table."""
        tables = [read_rewards(self.workspace.store, ref) for ref in self.inputs()]
        ids = tables[0].column("sample_id").to_pylist()
        for table, ref in zip(tables, self.inputs(), strict=True):
            if table.column("sample_id").to_pylist() != ids:
                raise CorruptError(
                    f"{ref} scores other samples than {self.inputs()[0]}. Run 'flowmill stage score' again."
                )
        rewards = torch.zeros(len(ids), dtype=torch.float64)
        for table, section in zip(tables, self.config.rewards, strict=True):
            rewards += section.weight * torch.tensor(table.column("reward").to_numpy(), dtype=torch.float64)
        prompt_ids = tables[0].column("prompt_id")
        groups = torch.tensor(prompt_ids.combine_chunks().dictionary_encode().indices.to_pylist())
        chosen = self.config.advantage
        advantages = group_advantages(rewards, groups, std=chosen.std, epsilon=chosen.epsilon, clip=chosen.clip)
        columns = {
            "sample_id": ids,
            "prompt_id": prompt_ids.to_pylist(),
            "reward": rewards.float().numpy(),
            "advantage": advantages.numpy(),
        }
        write_table(folder / "advantages.parquet", columns, ADVANTAGES)
        return Output(rows=len(ids), summary=_summary(rewards, groups, advantages))

    def summarize(self, records: Sequence[ShardRecord]) -> Mapping[str, Any]:
        """The figures of the one shard."""
        return records[0].summary


def read_rewards(store: ArtifactStore, ref: ArtifactRef) -> pa.Table:
    """Return all rows of a rewards artifact, in shard order."""
    store.require(ref)
    folders = [store.folder(ref, record) for record in store.records(ref)]
    return pa.concat_tables([read_table(folder / "rewards.parquet", REWARDS) for folder in folders])


def _summary(rewards: torch.Tensor, groups: torch.Tensor, advantages: torch.Tensor) -> dict[str, float]:
    statistics = group_statistics(rewards, groups)
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std(correction=0)),
        "group_std": float(statistics.std.mean()),
        "zero_std_ratio": float(statistics.constant.double().mean()),
        "abs_mean": float(advantages.abs().double().mean()),
    }
