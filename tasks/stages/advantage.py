"""Joins the rewards of an epoch into one advantage per sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

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
    groups_within,
    running_advantages,
    shape_advantages,
)
from tasks.algorithms.checks import check_advantage
from tasks.chain import Node
from tasks.components import open_trajectory_store
from tasks.stage import Output, Shard, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class _Epoch:
    """The samples of one epoch with what they earned."""

    samples: pa.Table
    """Any of its reward tables, for sample_id, prompt_id and group_id."""
    parts: Sequence[Tensor]
    """Per reward, (N,) float64."""
    penalty: Tensor
    """(N,) float64: kl_coef times the KL to the base model, mean over a sample's trained steps."""
    total: Tensor
    """(N,) float64: the weighted sum of rewards less the penalty."""


class AdvantageStage(Stage):
    """The rewards of an epoch, normalized within groups, as one advantage per sample."""

    name = "advantage"
    kind = "advantages"
    # 2: the KL enters GDPO and running statistics, which follow floor and unbiased; ranks are taken before clipping.
    version = 2

    def options(self) -> Mapping[str, Any]:
        """Weights in the order of the inputs, and the normalization."""
        weights = [section.weight for section in self.config.rewards]
        return {"advantage": self.config.advantage.model_dump(mode="json"), "weights": weights}

    def upstream(self) -> tuple[Node, ...]:
        """The rewards of this epoch, with running statistics those before it, with a KL reward their trajectories."""
        epochs = self._epoch_numbers()
        rewards = tuple(Node(epoch, "score", section.slot) for epoch in epochs for section in self.config.rewards)
        if self.config.advantage.kl_coef > 0:
            return (*rewards, *(Node(epoch, "rollout") for epoch in epochs))
        return rewards

    def shards(self) -> list[Shard]:
        """One: statistics are over the whole epoch."""
        return [Shard("advantages")]

    def run(self, shard: Shard, folder: Path) -> Output:
        """Compute and write the table.

        Raises:
            ConfigError: the settings exclude each other.
        """
        check_advantage(self.config)
        section = self.config.advantage
        now, *earlier = self._epochs()
        identity = {name: now.samples.column(name).to_pylist() for name in ("sample_id", "prompt_id", "group_id")}
        names = list(dict.fromkeys(identity["group_id"]))
        numbers = {name: number for number, name in enumerate(names)}
        groups = torch.tensor([numbers[name] for name in identity["group_id"]])
        advantages = self._normalized(now, groups, _history(names, earlier))
        if section.threshold is not None:
            advantages = damp_below(advantages, now.total, threshold=section.threshold, factor=section.below)
        shaped = shape_advantages(advantages, groups, mode=section.mode, best_of=section.best_of, clip=section.clip)
        kept = groups_within(now.total, groups, low=section.group_mean_min, high=section.group_mean_max)
        shaped = torch.where(kept, shaped, 0.0)
        columns = {
            **identity,
            "reward": now.total.float().numpy(),
            "advantage": shaped.numpy(),
        }
        write_table(folder / "advantages.parquet", columns, ADVANTAGES)
        return Output(rows=len(groups), summary=_summary(now.total, groups, shaped, kept))

    def _epoch_numbers(self) -> range:
        """Return the epochs whose rewards count, this one first."""
        return range(self.epoch, 0 if self.config.advantage.std == "running" else self.epoch - 1, -1)

    def _normalized(self, now: _Epoch, groups: Tensor, history: Sequence[Tensor]) -> Tensor:
        section = self.config.advantage
        normalizer = Normalizer(
            std="global" if section.std == "global" else "group",
            epsilon=section.epsilon,
            floor=section.floor,
            unbiased=section.unbiased,
        )
        if section.std == "running":
            sizes = {"buffer": section.buffer, "min_count": section.min_count}
            return running_advantages(now.total, groups, history, normalizer, **sizes)
        if section.aggregation == "sum":
            return group_advantages(now.total, groups, normalizer)
        weights = [reward.weight for reward in self.config.rewards]
        return gdpo_advantages(now.parts, weights, groups, normalizer, penalty=now.penalty)

    def _epochs(self) -> list[_Epoch]:
        """Return what the samples of each epoch earned, this one first."""
        count, refs = len(self.config.rewards), self.inputs()
        scored = [ref for ref in refs if ref.kind == "rewards"]
        rolled: Sequence[ArtifactRef | None] = [ref for ref in refs if ref.kind != "rewards"]
        rolled = rolled or [None] * len(self._epoch_numbers())
        return [self._earned(scored[i * count : (i + 1) * count], ref) for i, ref in enumerate(rolled)]

    def _earned(self, scored: Sequence[ArtifactRef], trajectories: ArtifactRef | None) -> _Epoch:
        """Return the rewards of one epoch, checked to be of the same samples."""
        tables = [read_rewards(self.context.store, ref) for ref in scored]
        ids = tables[0].column("sample_id")
        for ref, table in zip(scored, tables, strict=True):
            if table.column("sample_id") != ids:
                raise CorruptError(f"{ref} scores other samples than {scored[0]}. Run 'flowmill stage score' again.")
        parts = [_values(table) for table in tables]
        weighted = [section.weight * part for section, part in zip(self.config.rewards, parts, strict=True)]
        penalty = torch.zeros(len(ids), dtype=torch.float64)
        if trajectories is not None:
            penalty = self.config.advantage.kl_coef * self._divergence(trajectories, ids.to_pylist())
        return _Epoch(samples=tables[0], parts=parts, penalty=penalty, total=torch.stack(weighted).sum(0) - penalty)

    def _divergence(self, trajectories: ArtifactRef, sample_ids: Sequence[str]) -> Tensor:
        """Return each sample's KL to the base model, mean over its trained steps."""
        store = self.context.store
        opener = open_trajectory_store(self.config.rollout.store)
        found: dict[str, float] = {}
        for record in store.shards(trajectories):
            table = opener.open(store.files(trajectories, record)).table
            columns = (table.column(name).to_pylist() for name in ("sample_id", "reference_kl"))
            found |= {sample: sum(kl) / len(kl) for sample, kl in zip(*columns, strict=True)}
        return torch.tensor([found[sample] for sample in sample_ids], dtype=torch.float64)

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


def _history(names: Sequence[str], earlier: Sequence[_Epoch]) -> list[Tensor]:
    """Return each group's rewards of earlier epochs, oldest first, less the penalties of those epochs."""
    found: dict[str, list[float]] = {name: [] for name in names}
    for epoch in reversed(earlier):
        for name, total in zip(epoch.samples.column("group_id").to_pylist(), epoch.total.tolist(), strict=True):
            if name in found:
                found[name].append(total)
    return [torch.tensor(found[name], dtype=torch.float64) for name in names]


def _values(table: pa.Table) -> Tensor:
    return torch.tensor(table.column("reward").to_numpy(), dtype=torch.float64)


def _summary(rewards: Tensor, groups: Tensor, advantages: Tensor, kept: Tensor) -> dict[str, float]:
    statistics = group_statistics(rewards, groups)
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std(correction=0)),
        "group_std": float(statistics.std.mean()),
        "zero_std_ratio": float(statistics.constant.double().mean()),
        "filtered_ratio": float((~kept).double().mean()),
        "abs_mean": float(advantages.abs().double().mean()),
    }
