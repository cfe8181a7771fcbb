"""Which samples an epoch is trained on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.specs.base_spec import StageSpec
from tasks.specs.graph import Node, policy_of
from tasks.specs.modalities import modality_spec


class RolloutSpec(StageSpec):
    """The trajectories of an epoch."""

    name = "rollout"
    kind = "trajectories"

    def options(self) -> Mapping[str, Any]:
        """Everything that changes samples; shard and batch sizes do not."""
        about: dict[str, Any] = {"seed": self.config.run.seed, "epoch": self.epoch}
        if self.config.prompts.sources:
            about["mixture"] = {source.name: source.weight for source in self.config.prompts.sources}
        return {**modality_spec(self.config).rollout_options(self.config), **about}

    def upstream(self) -> tuple[Node, ...]:
        """The policy, the prompts."""
        return (policy_of(self.config, self.epoch), Node(0, "preprocess"))
