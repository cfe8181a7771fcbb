"""Checkpoints of a fit: the state of its next update, committed in the unfinished artifact of the reward."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from flowmill.configs.errors import CorruptError
from flowmill.models.weights.tensor_files import TensorFiles
from flowmill.storage.artifacts.checkpoints import commit_checkpoint, latest_checkpoint
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.layout import ArtifactRef

if TYPE_CHECKING:
    from torch import Tensor, nn

Curve = list[dict[str, float]]
_STATE, _CURVE = "state.safetensors", "curve.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class FitCheckpoints:
    """The checkpoints of one reward."""

    store: ArtifactStore
    """Where they are committed."""
    ref: ArtifactRef
    """The reward."""
    every: int
    """Updates between two of them; 0: none are written."""

    def resume(self, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.AdamW) -> tuple[int, Curve]:
        """Fill parameters and optimizer from the newest checkpoint; return its updates and curve, or 0 and none."""
        for parameter in parameters.values():
            # As AdamW makes them at its first step.
            moments = {kind: torch.zeros_like(parameter) for kind in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.zeros(()), **moments}
        checkpoint = latest_checkpoint(self.store, self.ref)
        if checkpoint is None:
            return 0, []
        update, folder = checkpoint
        stored, own = TensorFiles([folder / _STATE]), _tensors(parameters, optimizer)
        if set(stored.shapes) != set(own):
            raise CorruptError(f"'{folder}' is the checkpoint of another fit. Remove it, and the fit starts again.")
        stored.read_into(own)
        curve: Curve = json.loads((folder / _CURVE).read_text())
        return update, curve

    def take(
        self, update: int, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.AdamW, curve: Curve
    ) -> None:
        """Commit the state after some updates, if it is time for a checkpoint."""
        if not self.every or update % self.every:
            return
        with self.store.root.staging() as folder:
            save_file({name: each.cpu() for name, each in _tensors(parameters, optimizer).items()}, folder / _STATE)
            (folder / _CURVE).write_text(json.dumps(curve))
            commit_checkpoint(self.store, self.ref, update, folder)


def _tensors(parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    """Return parameters and their moments by name, sharing memory with them."""
    tensors = {f"weight/{name}": parameter.detach() for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        tensors |= {f"{kind}/{name}": each.reshape(-1) for kind, each in optimizer.state[parameter].items()}
    return tensors
