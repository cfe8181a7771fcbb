"""Chooses an epoch's ingested samples, and the advantage of each: 1 without a rating, the rating's sign and size."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowmill.tasks.inputs.data_section import data_of
from flowmill.tasks.specs.graph import Node
from flowmill.tasks.stages.stage import Output, Shard, Stage


class GivenAdvantageStage(Stage):
    """The ingested samples that an epoch trains on: slices of one permutation of groups per pass, with one view of each
    row and one of its captions."""

    only = "advantages"

    def options(self) -> Mapping[str, Any]:
        """Scale, neutral rating, the groups of an epoch, and what it draws for each."""
        data = data_of(self.config)
        given = {**data.model_dump(mode="json", include={"scale", "groups_per_epoch"}), "neutral": data.middle}
        if data.variants:
            given |= {"empty_captions": data.empty_captions, "prior": data.prior and data.prior.weight}
        return {"given": given, "seed": self.config.run.seed, "epoch": self.epoch}

    def upstream(self) -> tuple[Node, ...]:
        return (self.plan.samples_of(self.epoch),)

    def run(self, shard: Shard, folder: Path) -> Output:
        import numpy as np

        from flowmill.storage.trajectories.tables import read_rows, write_rows
        from flowmill.tasks.advantages.ratings import advantages_of_ratings
        from flowmill.tasks.choices.given import drawn_variants, epoch_groups

        section, (data,) = data_of(self.config), self.inputs()
        table = read_rows(self.context.store, data, "rewards")
        variants = read_rows(self.context.store, data, "variants") if section.variants else None
        names, draw = table.column("group_id").to_pylist(), {"seed": self.config.run.seed, "epoch": self.epoch}
        flags = [False] * len(names) if variants is None else variants.column("prior").to_pylist()
        groups = dict(zip(names, flags, strict=True))
        own, prior = ([name for name in groups if groups[name] is each] for each in (False, True))
        chosen = {*epoch_groups(own, prior, section.groups_per_epoch, **draw)}
        mask = [name in chosen for name in names]
        rows, prompts = table.filter(mask), None
        if variants is not None:
            drawn, prompts = drawn_variants(variants.filter(mask).to_pylist(), empty=section.empty_captions, **draw)
            rows = rows.take(drawn)
        rewards = rows.column("reward").to_numpy()
        advantages = advantages_of_ratings(rewards, section)
        if section.prior is not None:
            weighed = [groups[name] for name in rows.column("group_id").to_pylist()]
            advantages = np.where(weighed, np.float32(section.prior.weight), advantages)
        columns = {
            **{name: rows.column(name).to_pylist() for name in ("sample_id", "prompt_id", "group_id")},
            **({} if prompts is None else {"prompt_id": prompts}),
            "reward": rows.column("reward").to_pylist(),
            "advantage": advantages.tolist(),
        }
        write_rows("advantages", folder, columns, {"artifact": str(data)})
        summary = {"abs_mean": float(np.abs(advantages).mean()), "groups": len(chosen), "samples": rows.num_rows}
        if section.rating is not None:
            summary |= {"reward_mean": float(rewards.mean()), "reward_std": float(rewards.std())}
        return Output(rows=rows.num_rows, summary=summary)
