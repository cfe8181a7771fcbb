"""Chooses an epoch's ingested samples, and the advantage of each: 1 without a rating, the rating's sign and size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowmill.storage.artifacts.records import ShardRecord
from flowmill.tasks.inputs.data_section import data_of
from flowmill.tasks.specs.graph import Node
from flowmill.tasks.stages.stage import Output, Shard, Stage


class GivenAdvantageStage(Stage):
    """The ingested samples that an epoch trains on: slices of one permutation of groups per pass."""

    def options(self) -> Mapping[str, Any]:
        """Scale, neutral rating, and the groups of an epoch."""
        data = data_of(self.config)
        data_options = data.model_dump(mode="json", include={"scale", "groups_per_epoch"})
        return {"given": {**data_options, "neutral": data.middle}, "seed": self.config.run.seed, "epoch": self.epoch}

    def upstream(self) -> tuple[Node, ...]:
        """The ingested samples, with their ratings."""
        return (self.facts.plan.samples_of(self.epoch),)

    def shards(self) -> list[Shard]:
        """One."""
        return [Shard("advantages")]

    def summarize(self, records: Sequence[ShardRecord]) -> Mapping[str, Any]:
        """The figures of the one shard."""
        return records[0].summary

    def run(self, shard: Shard, folder: Path) -> Output:
        """Choose groups, and write the advantages of their samples."""
        import numpy as np

        from flowmill.storage.trajectories.tables import read_rows, write_rows
        from flowmill.tasks.advantages.ratings import advantages_of_ratings
        from flowmill.tasks.runs.seeds import epoch_prompts

        section, (data,) = data_of(self.config), self.inputs()
        table = read_rows(self.context.store, data, "rewards")
        names = table.column("group_id").to_pylist()
        groups = list(dict.fromkeys(names))
        size = min(section.groups_per_epoch or len(groups), len(groups))
        drawn = epoch_prompts(len(groups), size, seed=self.config.run.seed, epoch=self.epoch)
        chosen = {groups[index] for index in drawn}
        rows = table.filter([name in chosen for name in names])
        rewards = rows.column("reward").to_numpy()
        advantages = advantages_of_ratings(rewards, section)
        columns = {
            **{name: rows.column(name).to_pylist() for name in ("sample_id", "prompt_id", "group_id")},
            "reward": rows.column("reward").to_pylist(),
            "advantage": advantages.tolist(),
        }
        write_rows("advantages", folder, columns, {"artifact": str(data)})
        summary = {"abs_mean": float(np.abs(advantages).mean()), "groups": size, "samples": rows.num_rows}
        if section.rating is not None:
            summary |= {"reward_mean": float(rewards.mean()), "reward_std": float(rewards.std())}
        return Output(rows=rows.num_rows, summary=summary)
