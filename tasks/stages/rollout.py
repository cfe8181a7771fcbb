"""Rollouts: K samples per prompt, sharded by group, stored with the log-probs that made them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.schema import RunConfig
from storage.commit import ArtifactStore
from storage.layout import ArtifactRef
from storage.records import ShardRecord
from storage.trajectories.base import TrajectoryStore
from tasks.inputs.components import media_format, open_trajectory_store, sampling_sizes
from tasks.inputs.prompts import SOURCE, StoredPrompt
from tasks.kinds.kind import Job, Maker, Making
from tasks.runs.seeds import epoch_prompts, mixed_prompts
from tasks.stages.shard_writer import ShardWriter
from tasks.stages.stage import Output, Shard, Stage

if TYPE_CHECKING:
    from models.policies.base import Part


class RolloutStage(Stage):
    """Generates the trajectories of one epoch with the policy of the epoch before, or an older one."""

    separable = True
    _planned: tuple[ArtifactRef, list[Shard]] | None = None

    @property
    def parts(self) -> frozenset[Part]:
        """What makes samples."""
        return self.policy_kind.sampling_parts

    @property
    def saves_memory(self) -> tuple[str, ...]:
        """What to change when there is too little memory."""
        return self.policy_kind.saves_memory

    @property
    def sizes(self) -> Mapping[str, int | None]:
        """Of sampling and of decoding."""
        return sampling_sizes(self.config)

    def load(self) -> None:
        """What makes samples."""
        self._maker.load()

    def rest(self) -> None:
        """Take part in what other ranks still sample."""
        self._maker.rest()

    def shards(self) -> list[Shard]:
        """Ranges of groups: those of committed shards, and what is missing between them, which stays the plan."""
        if self._planned is None or self._planned[0] != self.ref:
            self._planned = (self.ref, planned_shards(self.context.store, self.config, self.ref))
        return self._planned[1]

    def run(self, shard: Shard, folder: Path) -> Output:
        """Sample the groups of one shard."""
        self.host.use_threads()
        size = self.config.rollout.group_size
        jobs = [self._job(prompt, n) for prompt in self.groups[shard.start : shard.stop] for n in range(size)]
        batch, form = self.config.execution.rollout_batch_size, media_format(self.config)
        recent = self.context.recent.begin(self.ref, shard.name, exact=form.lossless)
        with ShardWriter(self.trajectory_store.writer(folder, form), recent) as writer:
            for start in range(0, len(jobs), batch):
                part = jobs[start : start + batch]
                writer.add(self._maker.make(part))
                done, total = shard.start * size + start + len(part), len(self.groups) * size
                self.context.reporter.progress(self.name, self.epoch, done, total)
            about, contents = {"groups": shard.stop - shard.start}, writer.contents
            return Output(rows=writer.rows, summary=about, written=writer.end(), content=lambda: str(contents))

    def summarize(self, records: Sequence[ShardRecord]) -> Mapping[str, Any]:
        """Count groups and samples."""
        return {"groups": len(self.groups), "samples": sum(record.rows for record in records)}

    @cached_property
    def groups(self) -> list[StoredPrompt]:
        """The prompts of this epoch, one group each."""
        prompts, sources = self.context.prompts["train"], self.config.prompts.sources
        size, drawn = self.config.rollout.prompts_per_epoch, {"seed": self.config.run.seed, "epoch": self.epoch}
        if not sources:
            return [prompts[index] for index in epoch_prompts(len(prompts), size, **drawn)]
        lists = [[prompt for prompt in prompts if prompt.metadata[SOURCE] == source.name] for source in sources]
        chosen = mixed_prompts(list(map(len, lists)), [source.weight for source in sources], size, **drawn)
        return [lists[source][index] for source, index in chosen]

    @cached_property
    def trajectory_store(self) -> TrajectoryStore:
        """The format of the shards."""
        return open_trajectory_store(self.config.rollout.store)

    @cached_property
    def _maker(self) -> Maker:
        making = Making(context=self.context, host=self.host, policy=self.inputs()[0], epoch=self.epoch)
        return self.policy_kind.rollout(making)

    def _job(self, prompt: StoredPrompt, replica: int) -> Job:
        return Job(prompt=prompt, replica=replica, name=f"e{self.epoch:05d}-{prompt.id}-{replica:04d}")


def planned_shards(store: ArtifactStore, config: RunConfig, ref: ArtifactRef) -> list[Shard]:
    """Return the shards of a rollout, of one in the making as well; see ``cover``."""
    return cover(config.rollout.prompts_per_epoch, config.rollout.groups_per_shard, store.records(ref))


def cover(total: int, size: int, records: Sequence[ShardRecord]) -> list[Shard]:
    """Return shards that cover ``total`` items: committed ranges as they are, the gaps cut at multiples of ``size``.

    The shard size is not part of a fingerprint, so an artifact begun with one size may be finished with another.
    """
    committed = sorted(tuple(int(part) for part in record.shard.split("-")) for record in records)
    shards, position = [], 0
    for start, stop in [*committed, (total, total)]:
        while position < start:
            cut = min(start, (position // size + 1) * size)
            shards.append(Shard(f"{position:06d}-{cut:06d}", position, cut))
            position = cut
        if stop > start >= position:
            shards.append(Shard(f"{start:06d}-{stop:06d}", start, stop))
            position = stop
    return shards
