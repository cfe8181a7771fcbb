"""Deterministic evaluation: samples of fixed seeds, train and held-out prompts apart."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from flowmill.tasks.metrics.evaluations import SPLITS, named_range, split_of
from flowmill.tasks.modalities.samplers import Sampler, SampleRequest
from flowmill.tasks.runs.sharding import cover, evaluation_cuts
from flowmill.tasks.specs.graph import Node, policy_after
from flowmill.tasks.specs.turns import TurnNodes, split_turn, turn_nodes
from flowmill.tasks.stages.sampling import Sampling
from flowmill.tasks.stages.stage import Output, Shard

#: How many samples of each split a kind may write as files of their own.
_EXAMPLES = 4


class EvaluateStage(Sampling):
    """Samples of the policy after an epoch, of the same draws for every policy. Scoring them is judge's work.

    The slot names an evaluation that is not the run's own.
    """

    def options(self) -> Mapping[str, Any]:
        """The number of samples, the weights, and how the model is called."""
        section = self.config.evaluate
        return {
            "samples": section.samples,
            "seed": section.seed,
            "average": self.config.optimize.ema is not None,
            "store": self.config.rollout.store,
            **self.plan.modality_spec.evaluation_options(self.plan),
            **self.said(),
        }

    @property
    def before(self) -> TurnNodes | None:
        name, _ = split_turn(self.slot)
        return None if self.turn == 1 else turn_nodes(self.config, self.epoch, self.turn - 1, name, evaluation=True)

    def upstream(self) -> tuple[Node, ...]:
        return (policy_after(self.epoch), Node(0, "preprocess"), *self.heard())

    def planned_shards(self) -> list[Shard]:
        """Return ranges of samples of each split that has prompts; one that holds all of a split has its name."""
        total, ends = self.config.evaluate.samples, evaluation_cuts(self.config)
        committed: dict[str, list[tuple[int, int]]] = {split: [] for split in SPLITS}
        for name in self.context.store.committed(self.ref):
            committed[split_of(name)].append(named_range(name, total))
        return [
            Shard(split if stop - start == total else f"{split}-{start:06d}-{stop:06d}", start, stop)
            for split in SPLITS
            if self.context.prompts[split]
            for start, stop in cover(ends, committed[split])
        ]

    def run(self, shard: Shard, folder: Path) -> Output:
        total = self.config.evaluate.samples
        prompts = self.modality.readable(self.context, self.context.prompts[split_of(shard.name)])
        jobs = [
            SampleRequest(prompt=prompt, replica=replica, name=f"{split_of(shard.name)}-{prompt.id}-{replica:04d}")
            for replica, number in (divmod(number, len(prompts)) for number in range(shard.start, shard.stop))
            for prompt in (prompts[number],)
        ]
        output, examples = self.make(shard, folder, jobs, total, {}, returned=max(0, _EXAMPLES - shard.start))
        self.modality.add_examples(self.config, folder, examples, before=shard.start)
        return output

    def part_of(self, shard: Shard) -> str:
        return split_of(shard.name)

    @cached_property
    def maker(self) -> Sampler:
        return self.modality.evaluation(self.making)
