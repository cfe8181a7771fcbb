"""What a policy is trained on, and how."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from configs.advantages import ReplaySection
from configs.schema import OptimizeSection
from tasks.inputs.components import algorithm_needs
from tasks.inputs.option_paths import Place, algorithm_places, reward_places
from tasks.specs.base_spec import StageSpec
from tasks.specs.graph import Node, gradient_nodes, policy_after
from tasks.specs.modalities import modality_spec
from tasks.specs.run_inputs import critic_identity


class OptimizeSpec(StageSpec):
    """The policy after an epoch."""

    name = "optimize"
    kind = "policies"
    # 2: replayed rows are clipped around proximal means too; corrected KL scales, biases and weights of algorithms;
    # the loss of float16 training is scaled. 3: before the first update ratios are exactly 1, whatever the rounding;
    # layers with adapters compute with the sum of both.
    version = 3

    def options(self) -> Mapping[str, Any]:
        """The objective, the optimizer, what the log-probs belong to, and the seed of the row order."""
        return {
            "optimize": optimizer_options(self.config.optimize),
            **modality_spec(self.config).training_options(self.config),
            **critic_identity(self.facts),
            "seed": self.config.run.seed,
            "epoch": self.epoch,
        }

    def places(self) -> tuple[Place, ...]:
        """What the algorithm reads, and the rewards that are asked while training."""
        asked = self.config.rewards if algorithm_needs(self.config).rewards else ()
        return (*algorithm_places(self.config), *(place for reward in asked for place in reward_places(reward)))

    def upstream(self) -> tuple[Node, ...]:
        """The policy before, then what it is trained on: trajectories, advantages and, if any, gradients of rewards.

        Those of this epoch come first, then those of the replayed ones before it.
        """
        replay = self.config.optimize.replay
        first = max(1, self.epoch - (replay.epochs if replay else 0))
        epochs = range(self.epoch, first - 1, -1)
        found = [policy_after(self.epoch - 1)]
        for epoch in epochs:
            found += [Node(epoch, "rollout"), Node(epoch, "advantage"), *gradient_nodes(self.config, epoch)]
        return tuple(found)


def optimizer_options(section: OptimizeSection) -> Mapping[str, object]:
    """Return the settings of training that its result depends on."""
    # Policies that were trained before there was a choice keep their names.
    unused: dict[str, Any] = {"optimizer": True} if section.optimizer == "adamw" else {}
    if section.replay is not None:
        fields = ReplaySection.model_fields
        unused["replay"] = {
            name for name in ("share", "steps") if getattr(section.replay, name) == fields[name].default
        }
    return section.model_dump(mode="json", exclude=unused)
