"""Scores the trajectories of an epoch, also while they are sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowmill.models.rewards.base import Batch, Scores
from flowmill.storage.artifacts.records import ShardRecord
from flowmill.tasks.metrics.scores import figures_of, mean_figures
from flowmill.tasks.specs.graph import Node
from flowmill.tasks.specs.turns import split_turn
from flowmill.tasks.stages.rollout import RolloutStage, ends_group, planned_shards
from flowmill.tasks.stages.scoring import Scoring
from flowmill.tasks.stages.stage import Shard


class ScoreStage(Scoring):
    """A reward over the trajectories of an epoch; shards may be scored while others are rolled out."""

    _followed: RolloutStage | None = None

    def take_slot(self) -> None:
        label, self.earlier = split_turn(self.slot)
        self.section = self.facts.reward_section(label)

    def upstream(self) -> tuple[Node, ...]:
        """The trajectories, or their renders; of an earlier turn with its slot."""
        return (self.plan.scored_by(self.section, self.epoch, self.earlier),)

    def follow(self, rollout: RolloutStage) -> None:
        """Read trajectories that may still be in the making."""
        inputs = (rollout.ref,)
        self.adopt(self.context.chain.result_of(self.node, inputs), inputs)
        self._followed = rollout

    def sampled(self) -> list[str]:
        """The shards of the trajectories, or of their renders; unfinished rollouts use planned shards."""
        if self._followed is not None:
            return [shard.name for shard in self._followed.shards()]
        (trajectories,) = self.inputs()
        if self.reads_images or self.context.store.manifest(trajectories) is not None:
            return super().sampled()
        return [shard.name for shard in planned_shards(self.context.store, self.config, trajectories)]

    def whole(self, names: Sequence[str]) -> dict[str, list[str]]:
        """Shards that end within a group together with those that follow, up to its end."""
        groups, parts = dict[str, list[str]](), list[str]()
        for name in names:
            parts.append(name)
            if ends_group(name):
                groups["-".join([parts[0].split("-")[0], name.split("-")[1]])] = parts
                parts = []
        return groups

    def scored(self, shard: Shard, batch: Batch, scores: Scores, folder: Path) -> None:
        figures = figures_of(scores.values, None)
        if "mean" in figures and self.section in self.config.rewards:
            self.context.reporter.progress(self.name, self.epoch, 1, 1, f"{self.slot} {figures['mean']:.3f}")

    def summarize(self, records: Sequence[ShardRecord]) -> Mapping[str, Any]:
        return mean_figures([(record.rows, record.summary) for record in records])
