"""Chooses the prompts of an epoch from committed rewards of earlier ones, with a reason for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any

from configs.errors import ConfigError
from configs.registry import chosen
from storage.artifacts.records import ShardRecord
from storage.layout import ArtifactRef
from storage.trajectories.tables import read_rows, write_rows
from tasks.choices import SAMPLERS
from tasks.inputs.prompts import SOURCE
from tasks.specs.graph import Node
from tasks.stages.stage import Output, Shard, Stage

if TYPE_CHECKING:
    from tasks.choices.base import Candidate

#: Columns of the table of prompts' known rewards.
_KNOWN = ("drawn", "scored", "mean", "spread", "streak")


class ChooseStage(Stage):
    """The prompts of an epoch, one group each; runs whose sampler reads no rewards have no such stage."""

    def options(self) -> Mapping[str, Any]:
        """The sampler, its seed and the number of prompts."""
        return {
            "sampler": self.config.prompts.sampler.model_dump(mode="json"),
            "count": self.config.rollout.prompts_per_epoch,
            "weights": self.config.prompts.weights,
            "seed": self.config.run.seed,
            "epoch": self.epoch,
        }

    def upstream(self) -> tuple[Node, ...]:
        """The prompts, the choice before, and the newest rewards that are surely committed: those of a policy back.

        Rollouts of an epoch start as many epochs early as ``execution.ahead`` says.
        """
        before = (Node(self.epoch - 1, "choose"),) if self.epoch > 1 else ()
        known = self.epoch - 1 - self.config.execution.ahead
        return (Node(0, "preprocess"), *before, *((Node(known, "advantage"),) if known > 0 else ()))

    def shards(self) -> list[Shard]:
        """One."""
        return [Shard("choices")]

    def run(self, shard: Shard, folder: Path) -> Output:
        """Choose, and write the choices and the known rewards of each prompt.

        Raises:
            ConfigError: the sampler returns other than the wanted number of different prompts.
        """
        from tasks.choices.base import Choice, Draw

        candidates, means = self._candidates()
        section, count = self.config.prompts.sampler, self.config.rollout.prompts_per_epoch
        draw = Draw(
            candidates=candidates,
            count=count,
            seed=self.config.run.seed,
            epoch=self.epoch,
            weights=self.config.prompts.weights,
            means=means,
        )
        found = [Choice(*each) for each in chosen(SAMPLERS, section, label="prompts.sampler").choose(draw)]
        indices = {choice.place for choice in found}
        if not len(found) == len(indices) == count or not indices <= set(range(len(candidates))):
            raise ConfigError(
                f"prompts.sampler '{section.name}' chose {len(found)} prompts for epoch {self.epoch}, {len(indices)} "
                f"of them different; it must choose {count} different indices below {len(candidates)}."
            )
        columns = {
            "prompt_id": [candidates[each.place].id for each in found],
            "reason": [each.reason for each in found],
        }
        write_rows("choices", folder, columns)
        known = [each for each in candidates if each.drawn]
        states = {name: [getattr(each, name) for each in known] for name in _KNOWN}
        write_rows("prompt_states", folder, {"prompt_id": [each.id for each in known], **states})
        return Output(rows=count, summary={"known": sum(each.scored > 0 for each in known), "means": means})

    def summarize(self, records: Sequence[ShardRecord]) -> Mapping[str, Any]:
        """The number of prompts with known rewards, and the mean rewards of sources by epoch."""
        return records[0].summary

    def _candidates(self) -> tuple[list[Candidate], dict[str, list[float]]]:
        """Return all train prompts with their known rewards, and the mean rewards of sources by epoch."""
        from tasks.choices.base import Candidate

        found = {
            prompt.id: Candidate(id=prompt.id, source=str(prompt.metadata.get(SOURCE, "")))
            for prompt in self.context.prompts["train"]
        }
        means: dict[str, list[float]] = {name: [] for name in self.config.prompts.weights}
        for ref in self.inputs():
            if ref.kind == "choices":
                means = {name: list(each) for name, each in self.context.store.require(ref).summary["means"].items()}
                self._take_states(found, ref)
            elif ref.kind == "advantages":
                self._take_rewards(found, means, ref)
        return list(found.values()), means

    def _take_states(self, found: dict[str, Candidate], before: ArtifactRef) -> None:
        store = self.context.store
        for row in read_rows(store, before, "prompt_states").to_pylist():
            found[row["prompt_id"]] = replace(found[row["prompt_id"]], **{name: row[name] for name in _KNOWN})
        for name in read_rows(store, before).column("prompt_id").to_pylist():
            found[name] = replace(found[name], drawn=self.epoch - 1)

    def _take_rewards(self, found: dict[str, Candidate], means: dict[str, list[float]], ref: ArtifactRef) -> None:
        """Add the rewards of the newest known epoch; samples without a score do not count."""
        epoch, rewards = self.epoch - 1 - self.config.execution.ahead, dict[str, list[float]]()
        for row in read_rows(self.context.store, ref).select(["prompt_id", "reward"]).to_pylist():
            if row["reward"] is not None:
                rewards.setdefault(row["prompt_id"], []).append(row["reward"])
        of_sources: dict[str, list[float]] = {}
        for name, each in rewards.items():
            before, mean, spread = found[name], fmean(each), pstdev(each)
            streak = 1 + before.streak * (before.mean == mean) if spread == 0 else 0
            found[name] = replace(before, scored=epoch, mean=mean, spread=spread, streak=streak)
            of_sources.setdefault(before.source, []).append(mean)
        for source, each in of_sources.items():
            means[source].append(fmean(each))
