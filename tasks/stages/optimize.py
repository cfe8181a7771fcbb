"""One epoch of training as a stage, with checkpoints inside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowmill.models.policies.parts import Part
from flowmill.storage.artifacts.checkpoints import clear_checkpoints
from flowmill.storage.artifacts.records import ShardRecord
from flowmill.storage.layout import ArtifactRef
from flowmill.tasks.inputs.components import decode_rows
from flowmill.tasks.inputs.option_paths import OptionPath, algorithm_places, reward_places
from flowmill.tasks.specs.graph import Node, policy_after
from flowmill.tasks.specs.run_inputs import critic_identity
from flowmill.tasks.stages.policy import SHARD
from flowmill.tasks.stages.stage import Output, Shard, Stage

if TYPE_CHECKING:
    from flowmill.tasks.training.loop import TrainerState


class OptimizeStage(Stage):
    """Trains policy n-1 on the trajectories and advantages of epoch n; writes policy n."""

    collective = True
    only = SHARD
    _trained: TrainerState | None = None

    def options(self) -> Mapping[str, Any]:
        """The objective, the optimizer, the settings of log-probs, and the seed of the row order."""
        return {
            "optimize": self.config.optimize.fingerprinted(),
            **self.plan.modality_spec.training_options(self.plan),
            **critic_identity(self.facts),
            # Runs of earlier versions left out what comes after such an update, and retained it.
            **({} if self.config.optimize.stop_kl is None else {"undoes": True}),
            **self.plan.desired_alone,
            "seed": self.config.run.seed,
            "epoch": self.epoch,
        }

    def places(self) -> tuple[OptionPath, ...]:
        """Files of the algorithm, and of rewards that are called while training."""
        called = self.config.rewards if self.plan.needs.rewards else ()
        return (*algorithm_places(self.config), *(place for reward in called for place in reward_places(reward)))

    def upstream(self) -> tuple[Node, ...]:
        """The policy before, then its data: trajectories, advantages and, if any, gradients of rewards.

        Those of this epoch come first, then those of the replayed ones before it.
        """
        replay = self.config.optimize.replay
        first = max(1, self.epoch - (replay.epochs if replay else 0))
        epochs = range(self.epoch, first - 1, -1)
        nodes = [policy_after(self.epoch - 1)]
        for epoch in epochs:
            nodes += [self.plan.samples_of(epoch), Node(epoch, "advantage"), *self.plan.gradients(epoch)]
        return tuple(nodes)

    @property
    def parts(self) -> frozenset[Part]:
        """Trained parts, and parts that rewards called while training need."""
        requires = self.plan.algorithm.requires
        critic = frozenset({Part.CRITIC} if requires.critic else ())
        rewards = self.modality.asked_parts(self.config) if requires.rewards else frozenset()
        return self.modality.training_parts | critic | rewards

    @property
    def sizes(self) -> Mapping[str, int | None]:
        size = {"micro_batch_size": self.config.execution.micro_batch_size}
        if not self.plan.algorithm.requires.rewards:
            return size
        own = [section.batch_size for section in self.config.rewards if section.batch_size is not None]
        return {**size, "decode_batch_size": decode_rows(self.config), "batch_size": min(own, default=None)}

    def run(self, shard: Shard, folder: Path) -> Output:
        """Train, resuming from the last committed checkpoint of this epoch."""
        from flowmill.tasks.training.data import TrainingData
        from flowmill.tasks.training.epoch import TrainingEpoch
        from flowmill.tasks.training.policy_moves import move_limits

        data = TrainingData(self.context, self.modality, self.epoch, self.inputs())
        epoch = TrainingEpoch(data, self.host, self.ref)
        undone: Mapping[str, float] = {}
        while True:
            with epoch.updates(folder, undone) as (run_updates, trained, rows):
                run_updates()
            if trained.left_out == undone:
                break
            undone = trained.left_out
            del trained  # its moments are no longer needed, and take memory
        self._trained = trained
        left_out = {} if self.config.optimize.stop_kl is None else {"left_out": 0, **trained.left_out}
        moved = {**trained.moved, **(move_limits(data.algorithm) if data.algorithm.requires.approx_kl else {})}
        return Output(rows=rows, summary={"updates": trained.metrics, **moved, **left_out})

    def committed(self, record: ShardRecord) -> None:
        """Keep the policy that was just trained: its weights are those of the artifact now.

        Its trainer too, but on devices whose memory rollouts need.
        """
        self.host.keep(self.ref)
        if self._trained is not None and self.host.device.type == "cpu":
            self.host.trainer = self.ref, replace(self._trained, metrics=[], left_out={}, moved={})
        self._trained = None

    def cleanup(self, ref: ArtifactRef) -> None:
        clear_checkpoints(self.context.store, ref)
