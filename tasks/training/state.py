"""The training state as files: weights, average, optimizer moments, metrics. Equal state gives equal bytes.

If every rank holds the full state, the first rank writes whole tensors; if it is sharded, each rank writes its part.
Any number of ranks can read either form, sharded or not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from flowmill.configs.errors import CorruptError
from flowmill.models.policies.trainable import Trainable
from flowmill.models.weights.tensor_files import TensorFiles, begin_parts, finish_parts, write_parts
from flowmill.storage.layout import part_folder
from flowmill.tasks.inputs.weight_sources import CRITIC, CRITIC_OPTIMIZER, OPTIMIZER, Weights, tensor_files
from flowmill.tasks.runtime.ranks import Ranks
from flowmill.tasks.training.loop import TrainerState
from flowmill.tasks.training.loss_scaling import LossScale
from flowmill.tasks.training.optimizers import MomentOptimizer

METRICS = "metrics.json"


@dataclass(frozen=True, slots=True)
class PartFiles:
    """The files of a further trained model."""

    weights: str
    optimizer: str
    """Its optimizer's moments."""


#: Files by the name of the part.
PART_FILES = {"critic": PartFiles(CRITIC, CRITIC_OPTIMIZER)}

Files = Mapping[str, Mapping[str, Tensor]]


def write_state(
    state: TrainerState, folder: Path, ranks: Ranks, *, behavior: Mapping[str, Tensor] | None = None
) -> None:
    """Write weights, average, optimizer moments and the metrics so far; all ranks must call this together.

    Args:
        state: of training.
        folder: this rank's folder.
        ranks: the ranks that train together.
        behavior: weights of the next rollout's policy by parameter name, if it is another one.
    """
    files = _files(state)
    if behavior is not None:
        files[Weights.BEHAVIOR.value] = behavior
    if state.trainable.sharded:
        write_parts(files, folder / part_folder(ranks.rank), ranks.group)
    elif ranks.first:
        _write_whole(files, folder)
    if ranks.first:
        (folder / METRICS).write_text(_progress(state))


class StateCopy:
    """A snapshot of the training state, written while training continues."""

    def __init__(self, state: TrainerState, folder: Path, ranks: Ranks) -> None:
        """Copy this rank's part to host memory; all ranks must do so together.

        Args:
            state: of training.
            folder: this rank's folder.
            ranks: the ranks that train together, on a channel without other traffic.
        """
        self._folder, self._part, self._first = folder, folder / part_folder(ranks.rank), ranks.first
        self._progress = _progress(state)
        self._started: Future[Any] | None = None
        self._files = _files(state)
        if state.trainable.sharded:
            assert ranks.group is not None
            self._started = begin_parts(self._files, self._part, ranks.group)
        elif self._first:
            for file, tensors in self._files.items():
                self._files[file] = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}

    def finish(self) -> None:
        """Write the rest, in the calling thread."""
        if self._started is not None:
            self._started.result()
            finish_parts(self._files, self._part)
        elif self._first:
            _write_whole(self._files, self._folder)
        if self._first:
            (self._folder / METRICS).write_text(self._progress)


def read_state(state: TrainerState, folder: Path) -> None:
    """Read the files of ``write_state``, on any ranks."""
    state.trainable.read(tensor_files(folder, Weights.TRAINED.value))
    own = dict(state.trainable.named_parameters())
    if state.ema is not None:
        files = tensor_files(folder, Weights.AVERAGE.value)
        if not files:
            raise CorruptError(f"{folder} has no moving average, but optimize.ema is set.")
        TensorFiles(files).read_into(dict(zip(own, state.ema.values, strict=True)))
    _read_moments(state.optimizer, tensor_files(folder, OPTIMIZER), own)
    for name, part in state.extra_parts.items():
        weights = tensor_files(folder, PART_FILES[name].weights)
        if not weights:
            continue  # the part was not trained until now and starts fresh
        part.trainable.read(weights)
        parameters = dict(part.trainable.named_parameters())
        _read_moments(part.optimizer, tensor_files(folder, PART_FILES[name].optimizer), parameters)
    progress = json.loads((folder / METRICS).read_text())
    state.total_updates = progress["total_updates"]
    state.metrics.extend(progress["metrics"])
    if state.scale is not None and "loss_scale" in progress:
        state.scale = LossScale(**progress["loss_scale"])


def _read_moments(optimizer: MomentOptimizer, files: Sequence[Path], own: Mapping[str, torch.nn.Parameter]) -> None:
    if not files:
        return  # ranks write no file without tensors: no parameter had a gradient yet
    stored, targets, begun = TensorFiles(files), dict[str, Tensor](), set[str]()
    for key in stored.shapes:
        name = key.partition("/")[2]
        if name not in own:
            raise CorruptError(f"{files[0]} holds moments of '{name}', which is not trained.")
        if name not in begun:
            begun.add(name)
            optimizer.begin(own[name])
            targets |= _moments(optimizer, own[name], name)
    if set(targets) != set(stored.shapes):
        odd = sorted(set(targets) ^ set(stored.shapes))[0]
        raise CorruptError(f"{files[0]} is the state of another optimizer; the first difference is '{odd}'.")
    stored.read_into(targets)


def _files(state: TrainerState) -> dict[str, Mapping[str, Tensor]]:
    own = _weights(state.trainable)
    files: dict[str, Mapping[str, Tensor]] = {Weights.TRAINED.value: own}
    if state.ema is not None:
        files[Weights.AVERAGE.value] = dict(zip(own, state.ema.values, strict=True))
    files[OPTIMIZER] = _all_moments(state.optimizer, state.trainable)
    for name, part in state.extra_parts.items():
        files[PART_FILES[name].weights] = _weights(part.trainable)
        files[PART_FILES[name].optimizer] = _all_moments(part.optimizer, part.trainable)
    return files


def _weights(trainable: Trainable) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in trainable.named_parameters()}


def _all_moments(optimizer: MomentOptimizer, trainable: Trainable) -> dict[str, Tensor]:
    moments: dict[str, Tensor] = {}
    for name, parameter in trainable.named_parameters():
        moments |= _moments(optimizer, parameter, name)
    return moments


def _moments(optimizer: MomentOptimizer, parameter: torch.nn.Parameter, name: str) -> dict[str, Tensor]:
    """Return the optimizer's moments of a parameter by file key; writing to them changes the optimizer."""
    moments = optimizer.moments(parameter).items()
    return {f"{kind}/{name}": tensor.detach().reshape(-1) if tensor.ndim == 0 else tensor for kind, tensor in moments}


def _write_whole(files: Files, folder: Path) -> None:
    for file, tensors in files.items():
        save_file({name: tensor.cpu() for name, tensor in tensors.items()}, folder / file)


def _progress(state: TrainerState) -> str:
    progress: dict[str, Any] = {"total_updates": state.total_updates, "metrics": state.metrics}
    if state.scale is not None:
        progress["loss_scale"] = asdict(state.scale)
    return json.dumps(progress, sort_keys=True)
