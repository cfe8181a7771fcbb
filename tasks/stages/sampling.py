"""Base of stages that sample a policy: jobs in shards, sampled batch by batch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowmill.storage.layout import ArtifactRef
from flowmill.storage.trajectories.base import Sample, TrajectoryShard, TrajectoryStore
from flowmill.storage.trajectories.tables import read_rows
from flowmill.tasks.inputs.components import media_format, open_trajectory_store, sampling_sizes
from flowmill.tasks.inputs.renderer import sees_images, turn_in
from flowmill.tasks.metrics.samples import places_of, stored_sample
from flowmill.tasks.modalities.samplers import Said, Sampler, SampleRequest, SamplingContext, WorksAhead
from flowmill.tasks.specs.graph import Node
from flowmill.tasks.specs.turns import TurnNodes, turns_of
from flowmill.tasks.stages.stage import Output, Shard, Stage

if TYPE_CHECKING:
    from flowmill.models.policies.parts import Part


class Sampling(Stage):
    """Samples of a policy, drawn in shards that need not know of each other."""

    separable = True
    _planned: tuple[ArtifactRef, list[Shard]] | None = None

    @property
    def parts(self) -> frozenset[Part]:
        return self.modality.sampling_parts

    @property
    def sizes(self) -> Mapping[str, int | None]:
        return sampling_sizes(self.config)

    def load(self) -> None:
        self.maker.load()

    def rest(self) -> None:
        """Take part in collective calls of ranks that still sample."""
        self.maker.rest()

    def shards(self) -> list[Shard]:
        """Ranges of samples: those of committed shards, and the gaps between them; the plan is cached."""
        if self._planned is None or self._planned[0] != self.ref:
            self._planned = (self.ref, self.planned_shards())
        return self._planned[1]

    @abstractmethod
    def planned_shards(self) -> list[Shard]:
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
        figures: Mapping[str, Any],
        *,
        returned: int = 0,
        split: Collection[str] = (),
    ) -> tuple[Output, list[Sample]]:
        """Make the samples of a shard and write them.

        Args:
            shard: the shard, of which ``start`` says how many jobs come before it.
            folder: where its files go.
            total: jobs of all shards that are counted together.
            figures: figures of the content.
            returned: how many samples to return.
            split: prompts of which other shards have samples of the same groups.
        """
        from flowmill.tasks.stages.shard_writer import ShardWriter

        self.host.use_threads()
        jobs = self.continued(jobs)
        batch, form, first = self.config.execution.rollout_batch_size, media_format(self.config), list[Sample]()
        recent = self.context.recent.begin(self.ref, shard.name, exact=form.lossless)
        with ShardWriter(self.trajectory_store.writer(folder, form), recent) as writer:
            parts, done = [jobs[start : start + batch] for start in range(0, len(jobs), batch)], shard.start
            maker = self.maker
            made_ones = maker.each(parts) if isinstance(maker, WorksAhead) else map(maker.make, parts)
            for part, samples in zip(parts, made_ones, strict=True):
                writer.add(samples)
                first += samples[: returned - len(first)]
                done += len(part)
                self.context.reporter.progress(self.name, self.epoch, done, total, self.part_of(shard))
            contents = writer.contents
            counted = {"repeats": writer.repeats, "split": writer.contents_of(split)}
            summary = {**figures, **{name: value for name, value in counted.items() if value}}
            output = Output(rows=writer.rows, summary=summary, written=writer.end(), content=lambda: str(contents))
            return output, first

    @property
    @abstractmethod
    def before(self) -> TurnNodes | None:
        """The stages of the turn before; None in the first."""

    def said(self) -> dict[str, Any]:
        """Return the options of turns: the length of conversations, on which widths of batches depend, and comments."""
        turns = turns_of(self.config)
        if turns is None:
            return {}
        names = ("count", "comment_tokens", *(("comment", "done") if self.turn > 1 else ()))
        names += ("sees",) if sees_images(self.config) else ()
        return {"turn": self.turn, "turns": {name: getattr(turns, name) for name in names}}

    def heard(self) -> tuple[Node, ...]:
        """Return the stages of the turn before that its texts, comments and, if they are seen, images come from."""
        if self.before is None:
            return ()
        seen = (self.before.images,) if sees_images(self.config) else ()
        return (self.before.texts, self.before.comment, *seen)

    def continued(self, jobs: Sequence[SampleRequest]) -> Sequence[SampleRequest]:
        """Return jobs with the turns before."""
        if self.before is None:
            return jobs
        turns, requests = turns_of(self.config), list[SampleRequest]()
        assert turns is not None
        image = str(self._input(self.before.images)) if sees_images(self.config) else None
        for job in jobs:
            shard, row = self._earlier[job.name]
            sample = stored_sample(shard, row)
            # A sample that has ended stays as its last turn left it.
            ended = turn_in(sample.metadata) < self.turn - 1 or turns.ends(shard.text(row) or "")
            comment = None if ended else turns.said(*self._comments[job.name])
            requests.append(replace(job, before=Said(sample=sample, comment=comment, turn=self.turn, image=image)))
        for shard, _ in self._earlier.values():
            shard.close()
        return requests

    def _input(self, node: Node) -> ArtifactRef:
        return dict(zip(self.upstream(), self.inputs(), strict=True))[node]

    @cached_property
    def _earlier(self) -> dict[str, tuple[TrajectoryShard, int]]:
        assert self.before is not None
        return places_of(self.context.store, self._input(self.before.texts), None)

    @cached_property
    def _comments(self) -> dict[str, tuple[str, float | None]]:
        assert self.before is not None
        table = read_rows(self.context.store, self._input(self.before.comment))
        return {row["sample_id"]: (row["note"] or "", row["reward"]) for row in table.to_pylist()}

    def part_of(self, shard: Shard) -> str:
        """Return which samples are counted together, where not all are."""
        return ""
