"""Joins the rewards of an epoch into one advantage per sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from configs.errors import CorruptError
from storage.commit import ArtifactStore
from storage.layout import ArtifactRef
from storage.records import ShardRecord
from storage.schema import ADVANTAGES, REWARDS, read_table, write_table
from tasks.algorithms.advantages import (
    Normalizer,
    damp_below,
    gdpo_advantages,
    group_advantages,
    group_statistics,
    running_advantages,
    shape_advantages,
)
from tasks.chain import Node
from tasks.rollout import open_trajectory_store
from tasks.stage import Output, Shard, Stage


class AdvantageStage(Stage):
    """The rewards of an epoch, normalized within groups, as one advantage per sample."""

    name = "advantage"
    kind = "advantages"

    def options(self) -> Mapping[str, Any]:
        """Weights in the order of the inputs, and the normalization."""
        weights = [section.weight for section in self.config.rewards]
        return {"advantage": self.config.advantage.model_dump(mode="json"), "weights": weights}

    def upstream(self) -> tuple[Node, ...]:
        """The rewards of this epoch, with running statistics those before it, with a KL reward the trajectories."""
        first = 1 if self.config.advantage.std == "running" else self.epoch
        epochs = range(self.epoch, first - 1, -1)
        rewards = tuple(Node(epoch, "score", section.slot) for epoch in epochs for section in self.config.rewards)
        if self.config.advantage.kl_coef > 0:
            return (*rewards, Node(self.epoch, "rollout"))
        return rewards

    def shards(self) -> list[Shard]:
        """One: statistics are over the whole epoch."""
        return [Shard("advantages")]

    def run(self, shard: Shard, folder: Path) -> Output:
        """Compute and write the table."""
        now, *earlier = self._epochs()
        identity = {name: now[0].column(name).to_pylist() for name in ("sample_id", "prompt_id", "group_id")}
        names = list(dict.fromkeys(identity["group_id"]))
        numbers = {name: number for number, name in enumerate(names)}
        groups = torch.tensor([numbers[name] for name in identity["group_id"]])
        rewards = self._weighted(now) - self._kl_penalty(identity["sample_id"])
        section = self.config.advantage
        if section.std == "running":
            history = self._history(names, earlier)
            advantages = running_advantages(
                rewards, groups, history, buffer=section.buffer, min_count=section.min_count, epsilon=section.epsilon
            )
        else:
            advantages = self._normalized(now, rewards, groups)
        if section.threshold is not None:
            advantages = damp_below(advantages, rewards, threshold=section.threshold, factor=section.below)
        shaped = shape_advantages(advantages, groups, mode=section.mode, best_of=section.best_of, clip=section.clip)
        columns = {
            **identity,
            "reward": rewards.float().numpy(),
            "advantage": shaped.numpy(),
        }
        write_table(folder / "advantages.parquet", columns, ADVANTAGES)
        return Output(rows=len(groups), summary=_summary(rewards, groups, shaped))

    def _kl_penalty(self, sample_ids: Sequence[str]) -> torch.Tensor:
        """Return kl_coef times each sample's KL to the base model, mean over its trained steps."""
        coefficient = self.config.advantage.kl_coef
        if coefficient == 0:
            return torch.zeros(len(sample_ids), dtype=torch.float64)
        store, ref = self.workspace.store, self.inputs()[-1]
        opener = open_trajectory_store(self.config.rollout.store)
        found: dict[str, float] = {}
        for record in store.shards(ref):
            table = opener.open(store.files(ref, record)).table
            columns = (table.column(name).to_pylist() for name in ("sample_id", "reference_kl"))
            found |= {sample: sum(kl) / len(kl) for sample, kl in zip(*columns, strict=True)}
        return coefficient * torch.tensor([found[sample] for sample in sample_ids], dtype=torch.float64)

    def _normalized(self, tables: Sequence[pa.Table], rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        section = self.config.advantage
        normalizer = Normalizer(
            std="global" if section.std == "global" else "group",
            epsilon=section.epsilon,
            floor=section.floor,
            unbiased=section.unbiased,
        )
        if section.aggregation == "sum":
            return group_advantages(rewards, groups, normalizer)
        weights = [reward.weight for reward in self.config.rewards]
        return gdpo_advantages([_values(table) for table in tables], weights, groups, normalizer)

    def _epochs(self) -> list[list[pa.Table]]:
        """Return the reward tables of each epoch, this one first, checked to be of the same samples."""
        count, refs = len(self.config.rewards), [ref for ref in self.inputs() if ref.kind == "rewards"]
        tables = [read_rewards(self.workspace.store, ref) for ref in refs]
        for start in range(0, len(refs), count):
            ids = tables[start].column("sample_id")
            for offset in range(1, count):
                if tables[start + offset].column("sample_id") != ids:
                    raise CorruptError(
                        f"{refs[start + offset]} scores other samples than {refs[start]}. "
                        "Run 'flowmill stage score' again."
                    )
        return [tables[start : start + count] for start in range(0, len(refs), count)]

    def _weighted(self, tables: Sequence[pa.Table]) -> torch.Tensor:
        weights = [section.weight for section in self.config.rewards]
        return torch.stack([w * _values(table) for table, w in zip(tables, weights, strict=True)]).sum(0)

    def _history(self, names: Sequence[str], earlier: Sequence[Sequence[pa.Table]]) -> list[torch.Tensor]:
        """Return each group's rewards of earlier epochs, oldest first."""
        found: dict[str, list[float]] = {name: [] for name in names}
        for tables in reversed(earlier):
            totals = self._weighted(tables).tolist()
            for name, total in zip(tables[0].column("group_id").to_pylist(), totals, strict=True):
                if name in found:
                    found[name].append(total)
        return [torch.tensor(found[name], dtype=torch.float64) for name in names]

    def summarize(self, records: Sequence[ShardRecord]) -> Mapping[str, Any]:
        """The figures of the one shard."""
        return records[0].summary


def read_rewards(store: ArtifactStore, ref: ArtifactRef) -> pa.Table:
    """Return all rows of a rewards artifact, in shard order."""
    shards = [store.files(ref, record) for record in store.shards(ref)]
    return pa.concat_tables([read_table(files, "rewards.parquet", REWARDS) for files in shards])


def read_advantages(store: ArtifactStore, ref: ArtifactRef) -> pa.Table:
    """Return all rows of an advantages artifact."""
    shards = [store.files(ref, record) for record in store.shards(ref)]
    return pa.concat_tables([read_table(files, "advantages.parquet", ADVANTAGES) for files in shards])


def _values(table: pa.Table) -> torch.Tensor:
    return torch.tensor(table.column("reward").to_numpy(), dtype=torch.float64)


def _summary(rewards: torch.Tensor, groups: torch.Tensor, advantages: torch.Tensor) -> dict[str, float]:
    statistics = group_statistics(rewards, groups)
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std(correction=0)),
        "group_std": float(statistics.std.mean()),
        "zero_std_ratio": float(statistics.constant.double().mean()),
        "abs_mean": float(advantages.abs().double().mean()),
    }
