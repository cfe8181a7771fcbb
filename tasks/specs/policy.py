"""The policy before any training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.specs.base_spec import StageSpec
from tasks.specs.graph import Node


class PolicySpec(StageSpec):
    """The base model itself, or adapters beside it, fresh or others'; all weights may be those of a checkpoint."""

    name = "policy"
    kind = "policies"

    def options(self) -> Mapping[str, Any]:
        """What is trained, and what it starts from: a checkpoint, adapters of a file, or the seed of fresh ones."""
        model = self.config.model
        start = {} if model.checkpoint is None else {"checkpoint": self.facts.checkpoint_identity}
        if model.lora is None:
            return {"trained": "full", **start}
        if model.lora.start is not None:
            # Rank, alpha and layers are the file's, whether the config says them too or not.
            return {"trained": "lora", "start": self.facts.adapter_identity}
        seed = {} if start else {"seed": self.config.run.seed}
        return {"trained": "lora", "lora": model.lora.model_dump(mode="json"), **seed, **start}

    def upstream(self) -> tuple[Node, ...]:
        """The base model."""
        return (Node(0, "base"),)
