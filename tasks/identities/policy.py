"""The policy before any training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.identities.identity import Identity
from tasks.identities.nodes import Node


class PolicyIdentity(Identity):
    """The base model itself, or fresh adapters beside it."""

    name = "policy"
    kind = "policies"

    def options(self) -> Mapping[str, Any]:
        """What is trained, and the seed of fresh LoRA weights."""
        lora = self.config.model.lora
        if lora is None:
            return {"trained": "full"}
        return {"trained": "lora", "lora": lora.model_dump(mode="json"), "seed": self.config.run.seed}

    def upstream(self) -> tuple[Node, ...]:
        """The base model."""
        return (Node(0, "base"),)
