"""Export of a trained policy as a ``torch.distributed.checkpoint``, for tools that evaluate or train it further."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from configs.errors import ConfigError
from configs.registry import resolve
from models.policies import POLICIES
from models.weights.dcp_checkpoints import write_checkpoint
from models.weights.tensor_files import TensorFiles
from tasks.export.copying import new_folder
from tasks.inputs.components import lora_spec
from tasks.inputs.weight_sources import CRITIC, CRITIC_OPTIMIZER, OPTIMIZER, Weights, policy_folder, tensor_files
from tasks.runs.context import RunContext
from tasks.specs.graph import policy_after

#: Name in the checkpoint -> name of the policy's file.
_WEIGHTS = {
    "model": Weights.TRAINED.value,
    "ema": Weights.AVERAGE.value,
    "behavior": Weights.BEHAVIOR.value,
    "critic": CRITIC,
}
_OPTIMIZERS = {"optim": OPTIMIZER, "critic_optim": CRITIC_OPTIMIZER}
#: State of torch's AdamW per parameter.
_MOMENTS = {"step", "exp_avg", "exp_avg_sq"}
ABOUT = "about.json"


def export_checkpoint(context: RunContext, epoch: int | None, to: Path) -> tuple[list[str], list[str]]:
    """Write the policy after an epoch as a checkpoint; return the written and the unsupported parts (8-bit moments).

    Args:
        context: the run.
        epoch: the epoch; the run's last when None.
        to: a folder that does not exist yet, or is empty.

    Raises:
        ConfigError: the folder is not empty or cannot be written, or the policy is the base model itself.
        NotCommittedError: the epoch was not trained.
    """
    wanted = context.config.run.epochs if epoch is None else epoch
    source = policy_folder(context.store, context.chain.require(*policy_after(wanted)).ref)
    held = _Held(source)
    if not held.state:
        raise ConfigError(
            f"The policy of run '{context.run.name}' after epoch {wanted} is the base model itself: no weights of it "
            "are stored. Export one that was trained, or save the base model with dcp.save()."
        )
    section = context.config.optimize
    group = {"lr": section.learning_rate, "betas": list(section.betas), "eps": section.epsilon}
    group["weight_decay"] = section.weight_decay
    for name in _OPTIMIZERS.keys() & held.state.keys():
        moments = held.state[name]
        held.state[name] = {"state": moments, "param_groups": [{**group, "params": list(moments)}]}
    spec = lora_spec(context.config, resolve(POLICIES, context.config.model.policy, label="model.policy"))
    about = {
        "run": context.run.name,
        "epoch": wanted,
        "base": context.model_identity if context.config.model.path is not None else None,
        "lora": None if spec is None else asdict(spec),
    }
    with new_folder(to) as folder:
        write_checkpoint(held.state, folder, held.read)
        (folder / ABOUT).write_text(json.dumps(about, indent=2) + "\n")
    return sorted(held.state), held.left_out


class _Held:
    """The tensors of a policy by their key in a checkpoint, read from its files one by one."""

    def __init__(self, folder: Path) -> None:
        self.state: dict[str, Any] = {}
        self.left_out: list[str] = []
        self._places: dict[str, tuple[TensorFiles, str, torch.Size]] = {}
        for name, file in _WEIGHTS.items():
            files = tensor_files(folder, file)
            if files:
                self.state[name] = self._weights(name, TensorFiles(files))
        for name, file in _OPTIMIZERS.items():
            files = tensor_files(folder, file)
            kept = self._moments(name, TensorFiles(files)) if files else {}
            if kept:
                self.state[name] = kept
            elif files:
                self.left_out.append(name)

    def read(self, place: str) -> torch.Tensor:
        """Return a tensor, float32."""
        files, name, shape = self._places[place]
        found = torch.empty(files.shapes[name])
        files.read_into({name: found})
        return found.reshape(shape)

    def _weights(self, top: str, files: TensorFiles) -> dict[str, torch.Tensor]:
        return {name: self._place(f"{top}.{name}", files, name, size) for name, size in files.shapes.items()}

    def _moments(self, top: str, files: TensorFiles) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """Return moments by parameter, in the format of ``set_optimizer_state_dict``; empty for 8-bit moments."""
        moments: dict[str, dict[str, torch.Tensor]] = {}
        for key, size in files.shapes.items():
            kind, _, name = key.partition("/")
            if kind not in _MOMENTS:
                return {}
            shape = torch.Size(()) if kind == "step" else size
            place = f"{top}.state.{name}.{kind}"
            moments.setdefault(name, {})[kind] = self._place(place, files, key, shape)
        return moments

    def _place(self, place: str, files: TensorFiles, name: str, shape: torch.Size) -> torch.Tensor:
        self._places[place] = (files, name, shape)
        return torch.empty(shape, device="meta")
