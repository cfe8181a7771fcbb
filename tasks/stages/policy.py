"""The policy before any training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.fingerprint import canonical_json
from models.policies.base import Part
from tasks.chain import Node
from tasks.sources import Weights
from tasks.stage import Output, Shard, Stage

if TYPE_CHECKING:
    from torch import Tensor

ABOUT = "policy.json"
SHARD = "policy"


class PolicyStage(Stage):
    """The policy before training: the base model itself, or fresh LoRA weights (which change nothing yet)."""

    name = "policy"
    kind = "policies"
    parts = frozenset({Part.DENOISER})

    _fresh: Mapping[str, Tensor] | None = None

    def options(self) -> Mapping[str, Any]:
        """What is trained, and the seed of fresh LoRA weights."""
        lora = self.config.model.lora
        if lora is None:
            return {"trained": "full"}
        return {"trained": "lora", "lora": lora.model_dump(mode="json"), "seed": self.config.run.seed}

    def upstream(self) -> tuple[Node, ...]:
        """The base model."""
        return (Node(0, "base"),)

    def shards(self) -> list[Shard]:
        """One."""
        return [Shard(SHARD)]

    def load(self) -> None:
        """The fresh adapters, if there are any."""
        if self.config.model.lora is not None:
            self._fresh = self.host.fresh_state()

    def run(self, shard: Shard, folder: Path) -> Output:
        """Write fresh LoRA weights; for full weights the base model is the policy and nothing is copied."""
        (folder / ABOUT).write_text(canonical_json(self.options()))
        if self.config.model.lora is not None:
            from safetensors.torch import save_file

            save_file(dict(self._fresh or self.host.fresh_state()), folder / Weights.TRAINED.value)
        return Output(rows=1)
