"""What is known of the tokens of an epoch before they are rewarded: a critic's values, the base model's log-probs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.advantages.estimators import make_estimator
from tasks.specs.base_spec import StageSpec
from tasks.specs.graph import Node, policy_after
from tasks.specs.modalities import modality_spec
from tasks.specs.run_inputs import critic_identity


class ValueSpec(StageSpec):
    """Values and reference log-probs of an epoch's samples; no reward has a part in them."""

    name = "value"
    kind = "values"

    def options(self) -> Mapping[str, Any]:
        """Which of the two there are, and how they are computed."""
        estimator = make_estimator(self.config)
        about: dict[str, Any] = {"reference": estimator.needs_reference}
        if estimator.needs_values:
            about["critic"] = self.config.critic.model_dump(mode="json", include={"backbone", "dtype"})
            about |= critic_identity(self.facts)
            about["seed"] = self.config.run.seed
        return {**about, **modality_spec(self.config).value_options(self.config)}

    def upstream(self) -> tuple[Node, ...]:
        """The policy that the epoch trains, with its critic, and the trajectories."""
        return (policy_after(self.epoch - 1), Node(self.epoch, "rollout"))
