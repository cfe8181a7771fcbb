"""Chooses the prompts of an epoch from committed rewards of earlier ones, with a reason for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any

from flowmill.configs.errors import ConfigError
from flowmill.configs.registry import chosen
from flowmill.storage.layout import ArtifactRef
from flowmill.storage.trajectories.tables import read_rows, write_rows
from flowmill.tasks.choices import SAMPLERS
from flowmill.tasks.inputs.prompts import SOURCE
from flowmill.tasks.specs.graph import Node
from flowmill.tasks.stages.stage import Output, Shard, Stage

if TYPE_CHECKING:
    from flowmill.tasks.choices.base import Candidate

#: Columns of the table of prompts' recorded rewards.
_STATE = ("drawn", "scored", "mean", "spread", "streak")


class ChooseStage(Stage):
    """The prompts of an epoch, one group each; runs whose sampler reads no rewards have no such stage."""

    only = "choices"

    def options(self) -> Mapping[str, Any]:
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
        newest = self.epoch - 1 - self.config.execution.ahead
        return (Node(0, "preprocess"), *before, *((Node(newest, "advantage"),) if newest > 0 else ()))

    def run(self, shard: Shard, folder: Path) -> Output:
        """Choose, and write the choices and the recorded rewards of each prompt."""
        from flowmill.tasks.choices.base import Choice, Draw

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
        choices = [Choice(*each) for each in chosen(SAMPLERS, section, label="prompts.sampler").choose(draw)]
        indices = {choice.place for choice in choices}
        if not len(choices) == len(indices) == count or not indices <= set(range(len(candidates))):
            raise ConfigError(
                f"prompts.sampler '{section.name}' chose {len(choices)} prompts for epoch {self.epoch}, {len(indices)} "
                f"of them different; it must choose {count} different indices below {len(candidates)}."
            )
        columns = {
            "prompt_id": [candidates[each.place].id for each in choices],
            "reason": [each.reason for each in choices],
        }
        write_rows("choices", folder, columns)
        drawn = [each for each in candidates if each.drawn]
        states = {name: [getattr(each, name) for each in drawn] for name in _STATE}
        write_rows("prompt_states", folder, {"prompt_id": [each.id for each in drawn], **states})
        return Output(rows=count, summary={"known": sum(each.scored > 0 for each in drawn), "means": means})

    def _candidates(self) -> tuple[list[Candidate], dict[str, list[float]]]:
        """Return all train prompts with their recorded rewards, and the mean rewards of sources by epoch."""
        from flowmill.tasks.choices.base import Candidate

        candidates = {
            prompt.id: Candidate(id=prompt.id, source=str(prompt.metadata.get(SOURCE, "")), metadata=prompt.metadata)
            for prompt in self.context.prompts["train"]
        }
        means: dict[str, list[float]] = {name: [] for name in self.config.prompts.weights}
        for ref in self.inputs():
            if ref.kind == "choices":
                means = {name: list(each) for name, each in self.context.store.require(ref).summary["means"].items()}
                self._take_states(candidates, ref)
            elif ref.kind == "advantages":
                self._take_rewards(candidates, means, ref)
        return list(candidates.values()), means

    def _take_states(self, candidates: dict[str, Candidate], before: ArtifactRef) -> None:
        store = self.context.store
        for row in read_rows(store, before, "prompt_states").to_pylist():
            candidates[row["prompt_id"]] = replace(candidates[row["prompt_id"]], **{name: row[name] for name in _STATE})
        for name in read_rows(store, before).column("prompt_id").to_pylist():
            candidates[name] = replace(candidates[name], drawn=self.epoch - 1)

    def _take_rewards(self, candidates: dict[str, Candidate], means: dict[str, list[float]], ref: ArtifactRef) -> None:
        """Add the rewards of the newest recorded epoch; samples without a score do not count."""
        epoch, rewards = self.epoch - 1 - self.config.execution.ahead, dict[str, list[float]]()
        for row in read_rows(self.context.store, ref).select(["prompt_id", "reward"]).to_pylist():
            if row["reward"] is not None:
                rewards.setdefault(row["prompt_id"], []).append(row["reward"])
        of_sources: dict[str, list[float]] = {}
        for name, each in rewards.items():
            before, mean, spread = candidates[name], fmean(each), pstdev(each)
            streak = 1 + before.streak * (before.mean == mean) if spread == 0 else 0
            candidates[name] = replace(before, scored=epoch, mean=mean, spread=spread, streak=streak)
            of_sources.setdefault(before.source, []).append(mean)
        for source, each in of_sources.items():
            means[source].append(fmean(each))
