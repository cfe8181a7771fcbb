"""A reward that ``flowmill reward fit`` fitted on preferences or ratings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from flowmill.configs.errors import ConfigError
from flowmill.configs.model import LoraSection
from flowmill.configs.path_types import FitPlace, FolderPlace, ModelPlace
from flowmill.configs.registry import create, option_names, resolve
from flowmill.models.devices import chosen_device, local_rank
from flowmill.models.library_loading import read_json
from flowmill.models.rewards import BACKBONES
from flowmill.models.rewards.backbones import add_adapters
from flowmill.models.rewards.base import Needs, Scores
from flowmill.models.rewards.latents import read_layers
from flowmill.models.rewards.weight_files import WeightsFile

#: The files of a fitted reward.
ABOUT, HEAD, ADAPTERS = "reward.json", "head.safetensors", "adapter.safetensors"
_NAME = "fitted"
#: Options of a backbone that say where, and not how: a fitted reward has its own.
PLACES = ("model", "revision", "device")
#: Share of judgments that a coin orders right.
_CHANCE = 0.5
_REMEDY = "Name a folder that 'flowmill reward fit' wrote."


@dataclass(kw_only=True)
class Fitted:
    """The score of a backbone and a head: logits of preference with mean 0 over the fitted pairs, or a rating."""

    name: ClassVar[str] = _NAME

    path: FolderPlace = ""
    """Folder that ``flowmill reward fit`` wrote."""
    run: FitPlace | None = None
    """Instead of a folder, a fit of the store of the run: NAME, the newest, or NAME@NUMBER."""
    media: Literal["samples", "latents"] = "samples"
    """latents, for a reward that was fitted on latents."""
    model: ModelPlace | None = None
    """Folder, or id on the hub, of the model of its backbone without adapters, where that has one."""
    revision: str | None = None
    """Commit, tag or branch of the model on the hub."""
    device: str = "auto"
    """Torch device, or auto."""
    unproven: bool = False
    """Accept a reward whose accuracy on held-out judgments is not above chance."""
    _backbone: Any = field(init=False, repr=False)
    _layers: nn.Sequential = field(init=False, repr=False)
    _frozen: nn.ModuleList = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.run is not None or not self.path:
            raise ConfigError(_named_wrongly(self.path, self.run))
        device = chosen_device(self.device, local_rank(), label=f"device of reward '{_NAME}'")
        name, options, lora, accuracy = _described(self.path)
        low = accuracy["low"]
        if may_be_chance(accuracy) and not self.unproven:
            share = f"{accuracy['mean']:.3f} of its held-out judgments right"
            interval = "unknown interval" if low is None else f"95 %: {low:.3f} to {accuracy['high']:.3f}"
            raise ConfigError(
                f"reward '{_NAME}': '{self.path}' orders {share} ({interval}), which may be chance, and training on "
                "chance spoils a model. Judge samples of more prompts, several of each, or raise 'share', and fit "
                "again, or set the option 'unproven: true'."
            )
        kind = resolve(BACKBONES, name, label="backbone")
        media = "latents" if kind.judged == "latents" else "samples"
        if media != self.media:
            raise ConfigError(
                f"reward '{_NAME}': '{self.path}' was fitted on {kind.judged}, but the option 'media' is "
                f"'{self.media}'. Set it to '{media}'."
            )
        if ("model" in option_names(kind)) != (self.model is not None):
            state = "needs no model. Remove" if self.model else "does not hold the model of its backbone. Set"
            raise ConfigError(f"reward '{_NAME}': '{self.path}' {state} the option 'model'.")
        places = {each: getattr(self, each) for each in PLACES if self.model is not None}
        self._backbone = create(BACKBONES, name, {**options, **places}, label="backbone")
        if lora is not None:
            _read_adapters(self._file(ADAPTERS), add_adapters(self._backbone, name, lora, seed=0))
        self._layers = read_layers(self._file(HEAD), self._backbone.shares(()).shape[1]).to(device)
        # As attributes, they leave the device with the layers.
        self._frozen = nn.ModuleList(each for each in vars(self._backbone).values() if isinstance(each, nn.Module))

    def _file(self, name: str) -> WeightsFile:
        return WeightsFile(reward=_NAME, file=str(Path(self.path) / name), option="path", remedy=_REMEDY)

    @staticmethod
    def needs_for(options: Mapping[str, Any]) -> Needs:
        """Return the needs under some options: latents where it was fitted on those."""
        media: Literal["samples", "latents"] = "latents" if options.get("media") == "latents" else "samples"
        return Needs(media=media, accelerated=True, batch_size=16)

    @torch.inference_mode()
    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Scores:
        """Return one score per (H, W, 3) uint8 image, latents or text.

        Raises:
            ValueError: it was fitted on another kind of samples.
        """
        self._check("texts" if media.dtype == object else "latents" if media.dtype == np.float32 else "images")
        return Scores(self._scores(self._backbone.inputs(list(media), prompts), prompts).cpu().numpy())

    def differentiable(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Tensor:
        """Return one score per (3, H, W) image, or latents."""
        return self._scores(self._backbone.smooth(media, prompts), prompts)

    def _scores(self, inputs: Tensor, prompts: Sequence[str]) -> Tensor:
        device = next(self._layers.parameters()).device
        values: Tensor = self._layers(inputs.to(device)) * self._backbone.shares(prompts).to(device)
        return values.sum(-1)

    def _check(self, kind: str) -> None:
        if kind != self._backbone.judged:
            raise ValueError(f"it was fitted on {self._backbone.judged}, and is given {kind}")


def _named_wrongly(path: str, run: str | None) -> str:
    """Return the message that options name no fit, two, or one of a store where there is none."""
    if run is None:
        return f"reward '{_NAME}' names no fit. Set the option 'run' to its name, or 'path' to a folder."
    if path:
        return f"reward '{_NAME}' names the fit '{run}' (run) and the folder '{path}' (path). Remove one of the two."
    return (
        f"reward '{_NAME}' names the fit '{run}', which only a run finds, in its store. Copy it with 'flowmill reward "
        "fit CONFIG --to FOLDER', and set the option 'path' instead of 'run'."
    )


def may_be_chance(accuracy: Mapping[str, Any]) -> bool:
    """Return whether the interval of an accuracy on held-out judgments includes that of a coin, or there is none."""
    return accuracy["low"] is None or accuracy["low"] <= _CHANCE


def _read_adapters(file: WeightsFile, adapters: Mapping[str, nn.Parameter]) -> None:
    stored = file.read()
    if {name: value.shape for name, value in stored.items()} != {name: each.shape for name, each in adapters.items()}:
        raise file.unusable("its adapters are of another model, rank or layers")
    for name, parameter in adapters.items():
        parameter.requires_grad_(False).copy_(stored[name])


def _described(
    path: str,
) -> tuple[str, dict[str, Any], LoraSection | None, Mapping[str, float | None]]:
    """Return backbone, options, adapters and held-out accuracy of a folder, which may be written by another user."""
    try:
        fields = read_json(Path(path) / ABOUT)
        name, options = str(fields["backbone"]["name"]), dict(fields["backbone"]["options"])
        lora = LoraSection.model_validate(fields["lora"]) if "lora" in fields else None
        figures = fields["heldout"]["accuracy"]
        accuracy = {
            key: None if figures[key] is None else float(figures[key]) for key in ("mean", "low", "high", "count")
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"reward '{_NAME}': '{path}' holds no fitted reward: {error}. {_REMEDY}") from None
    if name not in BACKBONES:
        raise ConfigError(f"reward '{_NAME}': '{path}' has the backbone {name!r}, which does not exist. {_REMEDY}")
    return name, {option: value for option, value in options.items() if option not in PLACES}, lora, accuracy
