"""Which samples a policy is evaluated on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.specs.base_spec import StageSpec
from tasks.specs.graph import Node, policy_after
from tasks.specs.modalities import modality_spec


class EvaluateSpec(StageSpec):
    """Samples of the policy after an epoch, of fixed seeds; ``slot`` names an evaluation beside the run's own."""

    name = "evaluate"
    kind = "evaluations"
    # 2: images alone; scores are artifacts of their own.
    version = 2

    def options(self) -> Mapping[str, Any]:
        """How many samples, which weights, and how the model is called."""
        section = self.config.evaluate
        return {
            "samples": section.samples,
            "seed": section.seed,
            "average": self.config.optimize.ema is not None,
            "store": self.config.rollout.store,
            **modality_spec(self.config).evaluation_options(self.config),
        }

    def upstream(self) -> tuple[Node, ...]:
        """The policy, the prompts."""
        return (policy_after(self.epoch), Node(0, "preprocess"))
