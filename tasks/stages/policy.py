"""The policy before any training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from configs.fingerprint import canonical_json
from tasks.inputs.sources import ABOUT_POLICY, Weights
from tasks.stages.stage import Output, Shard, Stage

if TYPE_CHECKING:
    from torch import Tensor

    from models.policies.base import Part

SHARD = "policy"


class PolicyStage(Stage):
    """The policy before training: the base model itself, or fresh LoRA weights (which change nothing yet)."""

    @property
    def parts(self) -> frozenset[Part]:
        """What is trained."""
        return self.policy_kind.training_parts

    _fresh: Mapping[str, Tensor] | None = None

    def shards(self) -> list[Shard]:
        """One."""
        return [Shard(SHARD)]

    def load(self) -> None:
        """The fresh adapters, if there are any."""
        if self.config.model.lora is not None:
            self._fresh = self.host.fresh_state()

    def run(self, shard: Shard, folder: Path) -> Output:
        """Write fresh LoRA weights; for full weights the base model is the policy and nothing is copied."""
        (folder / ABOUT_POLICY).write_text(canonical_json(self.identity.options()))
        if self.config.model.lora is not None:
            from safetensors.torch import save_file

            save_file(dict(self._fresh or self.host.fresh_state()), folder / Weights.TRAINED.value)
        return Output(rows=1)
