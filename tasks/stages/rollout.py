"""Rollouts: K samples per prompt, cut into shards, stored with the log-probs of their sampling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from flowmill.configs.schema import RunConfig
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.artifacts.records import ShardRecord
from flowmill.storage.layout import ArtifactRef
from flowmill.storage.trajectories.tables import read_rows
from flowmill.tasks.inputs.prompts import SOURCE, StoredPrompt
from flowmill.tasks.modalities.samplers import Sampler, SampleRequest
from flowmill.tasks.runs.sharding import cover, rollout_cuts
from flowmill.tasks.specs.graph import Node
from flowmill.tasks.specs.turns import TurnNodes, turn_nodes
from flowmill.tasks.stages.sampling import Sampling
from flowmill.tasks.stages.stage import Output, Shard


class RolloutStage(Sampling):
    """Generates the trajectories of one epoch with the policy of the epoch before, or an older one."""

    def options(self) -> Mapping[str, Any]:
        """Everything that changes samples; shard and batch sizes do not."""
        common: dict[str, Any] = {"seed": self.config.run.seed, "epoch": self.epoch}
        if self.config.prompts.sources and not self.config.prompts.chooses:
            common["mixture"] = self.config.prompts.weights
        spec = self.plan.modality_spec
        drawn = {**spec.rollout_options(self.plan), **spec.redrawn_options(self.plan, self.epoch)}
        return {**drawn, **common, **self.said()}

    @property
    def before(self) -> TurnNodes | None:
        return None if self.turn == 1 else turn_nodes(self.config, self.epoch, self.turn - 1, evaluation=False)

    def upstream(self) -> tuple[Node, ...]:
        """The policy, the prompts, the turn before, and the choice of prompts."""
        plan = self.plan
        return (plan.policy_of(self.epoch), Node(0, "preprocess"), *self.heard(), *plan.choices(self.epoch))

    def planned_shards(self) -> list[Shard]:
        """Return ranges of groups, or of the samples of some."""
        return planned_shards(self.context.store, self.config, self.ref)

    def run(self, shard: Shard, folder: Path) -> Output:
        size = self.config.rollout.group_size
        places = [divmod(number, size) for number in range(shard.start, shard.stop)]
        jobs = [self._job(self.groups[group], replica) for group, replica in places]
        figures = {"groups": len({group for group, _ in places})}
        split = {self.groups[end // size].id for end in (shard.start, shard.stop) if end % size}
        return self.make(shard, folder, jobs, len(self.groups) * size, figures, split=split)[0]

    def summarize(self, records: Sequence[ShardRecord]) -> Mapping[str, Any]:
        """Count groups, samples, and samples that equal another of their group, if any."""
        repeats = sum(int(record.summary.get("repeats", 0)) for record in records)
        # Of groups that shards split, those that equal one of another shard.
        contents = [content for record in records for content in record.summary.get("split", ())]
        repeats += len(contents) - len(set(contents))
        counts = {"groups": len(self.groups), "samples": sum(record.rows for record in records)}
        return {**counts, "repeats": repeats} if repeats else counts

    @cached_property
    def groups(self) -> list[StoredPrompt]:
        """The prompts of this epoch, one group each."""
        prompts, section = self.context.prompts["train"], self.config.prompts
        if section.chooses:
            by_id, (*_, choices) = {prompt.id: prompt for prompt in prompts}, self.inputs()
            return [by_id[name] for name in read_rows(self.context.store, choices).column("prompt_id").to_pylist()]
        from flowmill.tasks.choices.permutation import permuted

        sources, count = [prompt.metadata.get(SOURCE, "") for prompt in prompts], self.config.rollout.prompts_per_epoch
        drawn = permuted(sources, section.weights, count, seed=self.config.run.seed, epoch=self.epoch)
        return [prompts[index] for index in drawn]

    @cached_property
    def maker(self) -> Sampler:
        return self.modality.rollout(self.making)

    def _job(self, prompt: StoredPrompt, replica: int) -> SampleRequest:
        return SampleRequest(prompt=prompt, replica=replica, name=f"e{self.epoch:05d}-{prompt.id}-{replica:04d}")


def planned_shards(store: ArtifactStore, config: RunConfig, ref: ArtifactRef) -> list[Shard]:
    """Return the shards of a rollout, of one in the making as well; see ``cover``."""
    size = config.rollout.group_size
    committed = [_range(name, size) for name in store.committed(ref)]
    return [Shard(_name(*ends, size), *ends) for ends in cover(rollout_cuts(config), committed)]


def ends_group(name: str) -> bool:
    """Return whether the last group of a shard ends with it."""
    return "_" not in name.split("-")[1]


def _name(start: int, stop: int, size: int) -> str:
    """Return the name of a range of samples: the groups, and within the first and last how many come before."""
    return "-".join(
        f"{group:06d}_{replica:04d}" if replica else f"{group:06d}"
        for group, replica in (divmod(number, size) for number in (start, stop))
    )


def _range(name: str, size: int) -> tuple[int, int]:
    ends = [[*map(int, end.split("_"))] for end in name.split("-")]
    start, stop = (end[0] * size + sum(end[1:]) for end in ends)
    return start, stop
