"""Deterministic evaluation: samples of fixed seeds, train and held-out prompts apart."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from storage.trajectories.base import Sample
from tasks.inputs.components import media_format, open_trajectory_store, sampling_sizes
from tasks.kinds.kind import Job, Maker, Making
from tasks.stages.shard_writer import ShardWriter
from tasks.stages.stage import Output, Shard, Stage

if TYPE_CHECKING:
    from models.policies.base import Part

SPLITS = ("heldout", "train")
#: How many samples of each split a kind may write as files of their own.
_EXAMPLES = 4


class EvaluateStage(Stage):
    """Samples of the policy after an epoch, of the same draws for every policy. Scoring them is judge's work."""

    separable = True

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
        """One per split that has prompts."""
        return [Shard(split) for split in SPLITS if self.context.prompts[split]]

    def run(self, shard: Shard, folder: Path) -> Output:
        """Sample one split."""
        self.host.use_threads()
        jobs = self._jobs(shard.name)
        size, examples = self.config.execution.rollout_batch_size, list[Sample]()
        form, store = media_format(self.config), open_trajectory_store(self.config.rollout.store)
        recent = self.context.recent.begin(self.ref, shard.name, exact=form.lossless)
        with ShardWriter(store.writer(folder, form), recent) as writer:
            for start in range(0, len(jobs), size):
                samples = self._maker.make(jobs[start : start + size])
                writer.add(samples)
                examples += samples[: _EXAMPLES - len(examples)]
                self.context.reporter.progress(self.name, self.epoch, start + len(samples), len(jobs), shard.name)
            self.policy_kind.add_examples(self.config, folder, examples)
            return Output(rows=len(jobs), written=writer.end())

    def _jobs(self, split: str) -> list[Job]:
        """Return as many samples as are asked for, of each prompt one before any has two."""
        prompts, jobs = self.context.prompts[split], list[Job]()
        for number in range(self.config.evaluate.samples):
            prompt, replica = prompts[number % len(prompts)], number // len(prompts)
            jobs.append(Job(prompt=prompt, replica=replica, name=f"{split}-{prompt.id}-{replica:04d}"))
        return jobs

    @cached_property
    def _maker(self) -> Maker:
        making = Making(context=self.context, host=self.host, policy=self.inputs()[0], epoch=self.epoch)
        return self.policy_kind.evaluation(making)
