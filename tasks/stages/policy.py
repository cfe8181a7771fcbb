"""The policy before any training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowmill.configs.errors import ConfigError
from flowmill.configs.fingerprint import canonical_json
from flowmill.configs.schema import RunConfig
from flowmill.storage.layout import ArtifactRef
from flowmill.tasks.inputs.weight_sources import POLICY_FILE, Weights, policy_folder, tensor_files
from flowmill.tasks.specs.graph import Node
from flowmill.tasks.stages.stage import Output, Shard, Stage

if TYPE_CHECKING:
    import torch

    from flowmill.models.policies.parts import Part

SHARD = "policy"


class PolicyStage(Stage):
    """The policy before training: the base model itself, fresh LoRA weights (which change nothing yet), or others'."""

    only = SHARD
    _fresh: Mapping[str, torch.Tensor] | None = None
    _shapes: Mapping[str, torch.Size] | None = None

    def options(self) -> Mapping[str, Any]:
        """The trained weights, and their start: another run's policy, adapters of a file, or the seed of fresh ones."""
        model = self.config.model
        start: dict[str, Any] = {}
        if model.start is not None:
            start = {"start": {name: self.facts.start[name] for name in ("policy", "digest", "weights")}}
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
        return (Node(0, "base"),)

    @property
    def parts(self) -> frozenset[Part]:
        return self.modality.training_parts

    def load(self) -> None:
        """Make fresh adapters if the run trains them; for weights of others read the shapes."""
        model = self.config.model
        if model.start is not None or _adapter_of(self.config):
            self._shapes = self.host.fresh().shapes()
        elif model.lora is not None:
            self._fresh = self.host.fresh().state()

    def run(self, shard: Shard, folder: Path) -> Output:
        """Write the weights of others, or fresh LoRA weights; else the base model is the policy: nothing is copied."""
        (folder / POLICY_FILE).write_text(canonical_json(self.options()))
        weights = self._weights()
        if weights:
            from safetensors.torch import save_file

            from flowmill.models.weights.finite import check_tensors

            model = self.config.model
            check_tensors(weights, f"model.{'start' if model.start else 'lora.start'}")
            save_file(dict(weights), folder / Weights.TRAINED.value)
        return Output(rows=1)

    def _weights(self) -> Mapping[str, torch.Tensor]:
        model = self.config.model
        if model.start is not None:
            return self._started(self._shapes or self.host.fresh().shapes())
        adapter = _adapter_of(self.config)
        if adapter is not None:
            return self.plan.family.read_adapter(adapter).weights(self._shapes or self.host.fresh().shapes())  # type: ignore[no-any-return]
        return {} if model.lora is None else self._fresh or self.host.fresh().state()

    def _started(self, shapes: Mapping[str, torch.Size]) -> Mapping[str, torch.Tensor]:
        """Return the weights of another run's policy; ConfigError if it is of another model."""
        import torch

        from flowmill.models.weights.tensor_files import TensorFiles

        start, base = self.facts.start, str(self.inputs()[0])
        if start.get("base", base) != base:
            raise ConfigError(
                f"model.start: '{self.config.model.start}' is trained from {start['base']}, and the base model of this "
                f"run is {base}. Set model.revision to the commit of that run."
            )
        if start["weights"] is None:
            return {}
        folder = policy_folder(self.context.store, ArtifactRef.parse(start["policy"]))
        tensors = {name: torch.empty(shape) for name, shape in shapes.items()}
        TensorFiles(tensor_files(folder, start["weights"])).read_into(tensors)
        return tensors


def _adapter_of(config: RunConfig) -> str | None:
    return None if config.model.lora is None else config.model.lora.start
