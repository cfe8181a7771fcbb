"""The policy before any training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.identities.identity import Identity
from tasks.identities.nodes import Node


class PolicyIdentity(Identity):
    """The base model itself, or adapters beside it, fresh or of a checkpoint; with one, all weights may be its."""

    name = "policy"
    kind = "policies"

    def options(self) -> Mapping[str, Any]:
        """What is trained, and what it starts from: a checkpoint, or the seed of fresh LoRA weights."""
        model = self.config.model
        start = {} if model.checkpoint is None else {"checkpoint": self.facts.checkpoint_identity}
        if model.lora is None:
            return {"trained": "full", **start}
        seed = {} if start else {"seed": self.config.run.seed}
        return {"trained": "lora", "lora": model.lora.model_dump(mode="json"), **seed, **start}

    def upstream(self) -> tuple[Node, ...]:
        """The base model."""
        return (Node(0, "base"),)
