"""The state of training as files: weights, average, optimizer moments, metrics. Equal state gives equal bytes."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from configs.errors import CorruptError
from models.sharding import assign, spread_like, whole
from tasks.optimize.loop import TrainerState
from tasks.optimize.scaling import LossScale
from tasks.sources import OPTIMIZER, Weights

METRICS = "metrics.json"


def write_state(state: TrainerState, folder: Path, *, first: bool) -> None:
    """Write weights, average, optimizer moments and the metrics so far.

    Of spread state every rank gives its part, so all must call this; only the first writes.
    """
    names = [name for name, _ in state.trainable.named_parameters()]
    files = {Weights.TRAINED.value: state.trainable.state()}
    if state.ema is not None:
        values = [whole(value).cpu() for value in state.ema.values]
        files[Weights.AVERAGE.value] = dict(zip(names, values, strict=True))
    moments: dict[str, torch.Tensor] = {}
    for name, parameter in state.trainable.named_parameters():
        for key, value in state.optimizer.state.get(parameter, {}).items():
            moment = whole(value.detach()).cpu()
            moments[f"{key}/{name}"] = moment.reshape(-1) if moment.ndim == 0 else moment
    files[OPTIMIZER] = moments
    if not first:
        return
    for file, tensors in files.items():
        save_file(tensors, folder / file)
    progress: dict[str, Any] = {"total_updates": state.total_updates, "metrics": state.metrics}
    if state.scale is not None:
        progress["loss_scale"] = asdict(state.scale)
    (folder / METRICS).write_text(json.dumps(progress, sort_keys=True))


def read_state(state: TrainerState, folder: Path) -> None:
    """Read what ``write_state`` wrote.

    Raises:
        CorruptError: the optimizer state belongs to other parameters.
    """
    state.trainable.load(load_file(folder / Weights.TRAINED.value))
    _read_average(state, folder)
    moments = load_file(folder / OPTIMIZER)
    own = dict(state.trainable.named_parameters())
    for key, value in moments.items():
        kind, _, name = key.partition("/")
        if name not in own:
            raise CorruptError(f"{folder / OPTIMIZER} holds moments of '{name}', which is not trained.")
        # A fused optimizer counts its steps where it works, the others on the CPU.
        counted_on = own[name].device if state.optimizer.defaults["fused"] else torch.device("cpu")
        placed = value.reshape(()).to(counted_on) if kind == "step" else spread_like(own[name], value)
        state.optimizer.state[own[name]][kind] = placed
    progress = json.loads((folder / METRICS).read_text())
    state.total_updates = progress["total_updates"]
    state.metrics.extend(progress["metrics"])
    if state.scale is not None and "loss_scale" in progress:
        state.scale = LossScale(**progress["loss_scale"])


def _read_average(state: TrainerState, folder: Path) -> None:
    if state.ema is None:
        return
    if not (folder / Weights.AVERAGE.value).exists():
        raise CorruptError(f"{folder} has no moving average, but optimize.ema is set.")
    stored = load_file(folder / Weights.AVERAGE.value)
    for value, (name, _) in zip(state.ema.values, state.trainable.named_parameters(), strict=True):
        assign(value, stored[name])
