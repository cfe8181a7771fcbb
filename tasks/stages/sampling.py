"""Base of stages that sample a policy: jobs in shards, made batch by batch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from storage.layout import ArtifactRef
from storage.trajectories.base import Sample, TrajectoryStore
from tasks.inputs.components import media_format, open_trajectory_store, sampling_sizes
from tasks.modalities.samplers import Sampler, SampleRequest, SamplingContext
from tasks.stages.stage import Output, Shard, Stage

if TYPE_CHECKING:
    from models.policies.parts import Part


class Sampling(Stage):
    """Samples of a policy, made in shards that need not know of each other."""

    separable = True
    _planned: tuple[ArtifactRef, list[Shard]] | None = None

    @property
    def parts(self) -> frozenset[Part]:
        """Model parts that sampling needs."""
        return self.policy_kind.sampling_parts

    @property
    def saves_memory(self) -> tuple[str, ...]:
        """Remedies for too little memory."""
        return self.policy_kind.saves_memory

    @property
    def sizes(self) -> Mapping[str, int | None]:
        """Of sampling and of decoding."""
        return sampling_sizes(self.config)

    def load(self) -> None:
        """Load the sampler's models."""
        self.maker.load()

    def rest(self) -> None:
        """Take part in collective calls of ranks that still sample."""
        self.maker.rest()

    def shards(self) -> list[Shard]:
        """Ranges of samples: those of committed shards, and the gaps between them; the plan is kept."""
        if self._planned is None or self._planned[0] != self.ref:
            self._planned = (self.ref, self.plan())
        return self._planned[1]

    @abstractmethod
    def plan(self) -> list[Shard]:
        """Return the shards of the artifact, of one in the making as well."""

    @property
    @abstractmethod
    def maker(self) -> Sampler:
        """The sampler."""

    @cached_property
    def making(self) -> SamplingContext:
        """The sampling context."""
        return SamplingContext(context=self.context, host=self.host, policy=self.inputs()[0], epoch=self.epoch)

    @cached_property
    def trajectory_store(self) -> TrajectoryStore:
        """The format of the shards."""
        return open_trajectory_store(self.config.rollout.store)

    def make(
        self,
        shard: Shard,
        folder: Path,
        jobs: Sequence[SampleRequest],
        total: int,
        about: Mapping[str, Any],
        *,
        kept: int = 0,
    ) -> tuple[Output, list[Sample]]:
        """Make the samples of a shard and write them.

        Args:
            shard: the shard, of which ``start`` says how many jobs come before it.
            folder: where its files go.
            jobs: its jobs.
            total: jobs of all shards that are counted together.
            about: figures about the content.
            kept: how many samples to return.
        """
        from tasks.stages.shard_writer import ShardWriter

        self.host.use_threads()
        batch, form, first = self.config.execution.rollout_batch_size, media_format(self.config), list[Sample]()
        recent = self.context.recent.begin(self.ref, shard.name, exact=form.lossless)
        with ShardWriter(self.trajectory_store.writer(folder, form), recent) as writer:
            parts, done = [jobs[start : start + batch] for start in range(0, len(jobs), batch)], shard.start
            for part, samples in zip(parts, self.maker.each(parts), strict=True):
                writer.add(samples)
                first += samples[: kept - len(first)]
                done += len(part)
                self.context.reporter.progress(self.name, self.epoch, done, total, self.part_of(shard))
            contents = writer.contents
            summary = {**about, **({"repeats": writer.repeats} if writer.repeats else {})}
            made = Output(rows=writer.rows, summary=summary, written=writer.end(), content=lambda: str(contents))
            return made, first

    def part_of(self, shard: Shard) -> str:
        """Return which samples are counted together, where not all are."""
        return ""
