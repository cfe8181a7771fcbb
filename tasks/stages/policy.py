"""The policy before any training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.fingerprint import canonical_json
from configs.registry import resolve
from configs.schema import RunConfig
from models.policies import POLICIES
from tasks.inputs.weight_sources import ABOUT_POLICY, Weights
from tasks.specs.graph import Node
from tasks.stages.stage import Output, Shard, Stage

if TYPE_CHECKING:
    import torch

    from models.policies.parts import Part

SHARD = "policy"


class PolicyStage(Stage):
    """The policy before training: the base model itself, fresh LoRA weights (which change nothing yet), or others'."""

    _fresh: Mapping[str, torch.Tensor] | None = None
    _shapes: Mapping[str, torch.Size] | None = None

    def options(self) -> Mapping[str, Any]:
        """The trained weights, and their start: a checkpoint, adapters of a file, or the seed of fresh ones."""
        model = self.config.model
        start = {} if model.checkpoint is None else {"checkpoint": self.facts.checkpoint_identity}
        if model.lora is None:
            return {"trained": "full", **start}
        # Everything later reads the policy, and so depends on the rounded base model.
        lora = {"trained": "lora", **({} if model.quantizer is None else {"quantize": model.quantizer})}
        if model.lora.start is not None:
            # Rank, alpha and layers are those of the file, even if the config repeats them.
            return {**lora, "start": self.facts.adapter_identity}
        seed = {} if start else {"seed": self.config.run.seed}
        return {**lora, "lora": model.lora.model_dump(mode="json"), **seed, **start}

    def upstream(self) -> tuple[Node, ...]:
        """The base model."""
        return (Node(0, "base"),)

    @property
    def parts(self) -> frozenset[Part]:
        """The trained parts."""
        return self.policy_kind.training_parts

    def shards(self) -> list[Shard]:
        """One."""
        return [Shard(SHARD)]

    def load(self) -> None:
        """Make fresh adapters if the run trains them; for weights of others read the shapes."""
        if self.config.model.checkpoint is not None or _adapter_of(self.config):
            self._shapes = self.host.fresh().shapes()
        elif self.config.model.lora is not None:
            self._fresh = self.host.fresh().state()

    def run(self, shard: Shard, folder: Path) -> Output:
        """Write the weights of others, or fresh LoRA weights; else the base model is the policy: nothing is copied."""
        (folder / ABOUT_POLICY).write_text(canonical_json(self.options()))
        weights = self._weights()
        if weights:
            from safetensors.torch import save_file

            from models.weights.finite import check_tensors

            check_tensors(weights, f"model.{'checkpoint' if self.config.model.checkpoint else 'lora.start'}")
            save_file(dict(weights), folder / Weights.TRAINED.value)
        return Output(rows=1)

    def _weights(self) -> Mapping[str, torch.Tensor]:
        model = self.config.model
        if model.checkpoint is not None:
            from models.weights.dcp_checkpoints import DcpCheckpoint

            return DcpCheckpoint(Path(model.checkpoint)).read(self._shapes or self.host.fresh().shapes())
        adapter = _adapter_of(self.config)
        if adapter is not None:
            family = resolve(POLICIES, model.policy, label="model.policy")
            return family.read_adapter(adapter).weights(self._shapes or self.host.fresh().shapes())  # type: ignore[no-any-return]
        return {} if model.lora is None else self._fresh or self.host.fresh().state()


def _adapter_of(config: RunConfig) -> str | None:
    return None if config.model.lora is None else config.model.lora.start
