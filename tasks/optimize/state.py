"""The state of training as files: weights, average, optimizer moments, metrics. Equal state gives equal bytes."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from configs.errors import CorruptError
from tasks.optimize.loop import TrainerState
from tasks.optimize.scaling import LossScale
from tasks.sources import OPTIMIZER, Weights

METRICS = "metrics.json"


def write_state(state: TrainerState, folder: Path) -> None:
    """Write weights, average, optimizer moments and the metrics so far."""
    names = [name for name, _ in state.trainable.named_parameters()]
    save_file(state.trainable.state(), folder / Weights.TRAINED.value)
    if state.ema is not None:
        save_file(dict(zip(names, (v.cpu() for v in state.ema.values), strict=True)), folder / Weights.AVERAGE.value)
    moments: dict[str, torch.Tensor] = {}
    for name, parameter in state.trainable.named_parameters():
        for key, value in state.optimizer.state.get(parameter, {}).items():
            moments[f"{key}/{name}"] = value.detach().cpu().reshape(-1) if value.ndim == 0 else value.detach().cpu()
    save_file(moments, folder / OPTIMIZER)
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
        moved = value.reshape(()) if kind == "step" else value.to(own[name].device)
        state.optimizer.state[own[name]][kind] = moved
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
        value.copy_(stored[name])
