"""Policy artifacts: the initial policy, and reading the weights of any."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from configs.fingerprint import canonical_json
from storage.commit import ArtifactStore
from storage.layout import ArtifactRef
from tasks.stage import Output, Shard, Stage

WEIGHTS = "policy.safetensors"
AVERAGE = "ema.safetensors"
OPTIMIZER = "optimizer.safetensors"
ABOUT = "policy.json"
SHARD = "policy"


class PolicyStage(Stage):
    """The policy before training: the base model itself, or fresh LoRA weights (which change nothing yet)."""

    name = "policy"
    kind = "policies"

    def options(self) -> Mapping[str, Any]:
        """What is trained, and the seed of fresh LoRA weights."""
        lora = self.config.model.lora
        if lora is None:
            return {"trained": "full"}
        return {"trained": "lora", "lora": lora.model_dump(mode="json"), "seed": self.config.run.seed}

    def inputs(self) -> tuple[ArtifactRef, ...]:
        """The base model."""
        return (self.workspace.run.require(0, "base").ref,)

    def shards(self) -> list[Shard]:
        """One."""
        return [Shard(SHARD)]

    def run(self, shard: Shard, folder: Path) -> Output:
        """Write fresh LoRA weights; for full weights the base model is the policy and nothing is copied."""
        (folder / ABOUT).write_text(canonical_json(self.options()))
        if self.config.model.lora is not None:
            save_file(self.workspace.fresh_state(), folder / WEIGHTS)
        return Output(rows=1)


def read_weights(store: ArtifactStore, ref: ArtifactRef, *, average: bool = False) -> dict[str, torch.Tensor] | None:
    """Return a policy's trained weights, or None for the base model itself.

    Args:
        store: the store.
        ref: the policy.
        average: the moving average instead, where the policy has one.

    Raises:
        NotCommittedError: the policy is not complete.
        CorruptError: its files are damaged.
    """
    folder = policy_folder(store, ref)
    path = folder / (AVERAGE if average and (folder / AVERAGE).exists() else WEIGHTS)
    return load_file(path) if path.exists() else None


def policy_folder(store: ArtifactStore, ref: ArtifactRef) -> Path:
    """Return the verified local folder of a complete policy."""
    store.require(ref)
    return store.folder(ref, store.records(ref)[0])
