"""Export of a trained policy as a ``torch.distributed.checkpoint``, for tools that evaluate or train it further."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from flowmill.configs.errors import ConfigError
from flowmill.models.weights.tensor_files import TensorFiles
from flowmill.tasks.export.copying import new_folder
from flowmill.tasks.inputs.weight_sources import (
    CRITIC,
    CRITIC_OPTIMIZER,
    OPTIMIZER,
    Weights,
    policy_folder,
    tensor_files,
)
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.specs.graph import policy_after

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.checkpoint.metadata import MetadataIndex

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
        epoch: the epoch; the run's last when None.
        to: a folder that does not exist yet, or is empty.
    """
    last = context.config.run.epochs if epoch is None else epoch
    source = policy_folder(context.store, context.chain.require(*policy_after(last)).ref)
    tensors = _PolicyTensors(source)
    if not tensors.state:
        raise ConfigError(
            f"The policy of run '{context.run.name}' after epoch {last} is the base model itself: no weights of it "
            "are stored. Export one that was trained, or save the base model with dcp.save()."
        )
    section, critic = context.config.optimize, context.config.critic
    for name, settings in (("optim", section), ("critic_optim", critic.settings_of(section))):
        if name in tensors.state:
            moments, group = tensors.state[name], {"lr": settings.learning_rate, "betas": list(settings.betas)}
            group |= {"eps": settings.epsilon, "weight_decay": settings.weight_decay, "params": list(moments)}
            tensors.state[name] = {"state": moments, "param_groups": [group]}
    spec = context.plan.lora
    metadata = {
        "run": context.run.name,
        "epoch": last,
        "base": context.model_identity if context.config.model.path is not None else None,
        "lora": None if spec is None else asdict(spec),
    }
    with new_folder(to) as folder:
        _write(tensors.state, folder, tensors.read)
        (folder / ABOUT).write_text(json.dumps(metadata, indent=2) + "\n")
    return sorted(tensors.state), tensors.left_out


class _PolicyTensors:
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
            moments = self._moments(name, TensorFiles(files)) if files else {}
            if moments:
                self.state[name] = moments
            elif files:
                self.left_out.append(name)

    def read(self, place: str) -> torch.Tensor:
        """Return a tensor, float32."""
        files, name, shape = self._places[place]
        tensor = torch.empty(files.shapes[name])
        files.read_into({name: tensor})
        return tensor.reshape(shape)

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


def _write(state: Mapping[str, Any], folder: Path, read: Callable[[str], Tensor]) -> None:
    """Write a checkpoint from this process alone. ``state``: nested mappings; tensors on the meta device are
    placeholders for ``read``; ``read``: returns the tensor for a placeholder's keys, joined by dots; only one is in
    memory at a time."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save(dict(state), storage_writer=_Writer(folder), planner=_Planner(read), no_dist=True)


class _Writer(FileSystemWriter):
    def storage_meta(self) -> None:
        """Return None: torch would store the folder's path, which changes when the folder moves."""


class _Planner(DefaultSavePlanner):
    """Reads a tensor when it is written."""

    def __init__(self, read: Callable[[str], Tensor]) -> None:
        super().__init__()
        self._read = read

    def lookup_object(self, index: MetadataIndex) -> Any:
        entry = super().lookup_object(index)
        return self._read(index.fqn) if isinstance(entry, torch.Tensor) and entry.is_meta else entry
