"""One epoch of training as a stage, with checkpoints inside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.policies.base import Part
from storage.checkpoints import clear_checkpoints
from storage.layout import ArtifactRef
from storage.records import ShardRecord
from tasks.chain import Node, policy_after
from tasks.optimize.optimizers import optimizer_identity
from tasks.stage import Output, Shard, Stage
from tasks.stages.policy import SHARD

if TYPE_CHECKING:
    from tasks.optimize.loop import TrainerState


class OptimizeStage(Stage):
    """Trains policy n-1 on the trajectories and advantages of epoch n; writes policy n."""

    name = "optimize"
    kind = "policies"
    # 2: replayed rows are clipped around proximal means too; corrected KL scales, biases and weights of algorithms;
    # the loss of float16 training is scaled. 3: before the first update ratios are exactly 1, whatever the rounding;
    # layers with adapters compute with the sum of both.
    version = 3
    collective = True
    parts = frozenset({Part.DENOISER})
    saves_memory = (
        "Lower execution.micro_batch_size, set model.gradient_checkpointing=true, or train adapters (model.lora).",
    )
    _trained: TrainerState | None = None

    def options(self) -> Mapping[str, Any]:
        """The objective, the optimizer, the step the log-probs belong to, and the seed of the row order."""
        return {
            "optimize": optimizer_identity(self.config.optimize),
            "sampler": self.config.rollout.sampler.model_dump(mode="json"),
            "seed": self.config.run.seed,
            "epoch": self.epoch,
        }

    def upstream(self) -> tuple[Node, ...]:
        """The policy before, then trajectories and advantages of this epoch and of the replayed ones before it."""
        replay = self.config.optimize.replay
        first = max(1, self.epoch - (replay.epochs if replay else 0))
        epochs = range(self.epoch, first - 1, -1)
        pairs = [(Node(epoch, "rollout"), Node(epoch, "advantage")) for epoch in epochs]
        return (policy_after(self.epoch - 1), *(node for pair in pairs for node in pair))

    def shards(self) -> list[Shard]:
        """One."""
        return [Shard(SHARD)]

    def run(self, shard: Shard, folder: Path) -> Output:
        """Train, resuming from the last committed checkpoint of this epoch."""
        from tasks.optimize.epoch import TrainingEpoch

        self._trained, output = TrainingEpoch(self).run(folder)
        return output

    def summarize(self, records: Sequence[ShardRecord]) -> Mapping[str, Any]:
        """Metrics of every update."""
        return records[0].summary

    def updates_of(self, sample_id: str) -> list[int]:
        """Return which updates of the epoch, counted from 0, a sample enters; no model is loaded."""
        from tasks.optimize.epoch import TrainingEpoch

        return TrainingEpoch(self).updates_of(sample_id)

    def committed(self, record: ShardRecord) -> None:
        """Keep the policy that was just trained: its weights are those of the artifact now.

        Its trainer too, but on devices whose memory rollouts need.
        """
        from tasks.optimize.state import Kept

        self.host.keep(self.ref)
        if self._trained is not None and self.host.device.type == "cpu":
            self.host.trainer = Kept.of(self._trained, str(self.ref))
        self._trained = None

    def cleanup(self, ref: ArtifactRef) -> None:
        """Remove the checkpoints within the epoch."""
        clear_checkpoints(self.context.store, ref)
