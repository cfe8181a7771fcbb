"""A reward on final latents, without decoding and without an autoencoder."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import nn

from flowmill.configs.path_types import FilePlace
from flowmill.models.devices import chosen_device, local_rank
from flowmill.models.rewards.base import Metadata, Needs, Scores
from flowmill.models.rewards.weight_files import WeightsFile

_LAYER = re.compile(r"(\d+)\.weight")
_REMEDY = (
    "Layers are N.weight and N.bias, convolutions (4 dimensions) before linear ones (2), the last with one output; "
    "save them with safetensors.torch.save_file."
)


@dataclass(kw_only=True)
class LatentHead:
    """Custom layers on final latents, with ReLU between them. The layers are those of a safetensors file, ``0.weight``,
    ``0.bias``, ``1.weight``, ... : convolutions (4 dimensions, padded to keep the size), then linear ones (2
    dimensions) on flattened values; the last has one output."""

    needs: ClassVar[Needs] = Needs(media="latents", accelerated=True, batch_size=16)

    head: FilePlace
    """Safetensors file of the layers."""
    device: str = "auto"
    """Torch device, or auto."""

    def __post_init__(self) -> None:
        """Load the layers; raise ConfigError if there are none, or they do not fit together."""
        device = chosen_device(self.device, local_rank(), label="device of reward 'latent_head'")
        self._layers = read_layers(WeightsFile(reward="latent_head", file=self.head, option="head", remedy=_REMEDY)).to(
            device
        )

    @torch.inference_mode()
    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Metadata) -> Scores:
        """Return one score per (C, h, w) float32 latents, or latents of another shape that the first layer takes."""
        values: np.ndarray = self.differentiable(torch.from_numpy(np.array(media)), prompts, metadata).cpu().numpy()
        return Scores(values)

    def differentiable(self, media: torch.Tensor, prompts: Sequence[str], metadata: Metadata) -> torch.Tensor:
        """Return one score per latents."""
        first = next(self._layers.parameters())
        latents = media.to(first.device, first.dtype)
        return self._layers(latents if first.ndim == 4 else latents.flatten(1)).squeeze(-1)


def layer_tensors(layers: nn.Sequential) -> dict[str, torch.Tensor]:
    """Return the tensors of layers by the names under which ``read_layers`` finds them."""
    with_parameters = [layer for layer in layers if any(True for _ in layer.parameters())]
    return {
        f"{number}.{name}": tensor.detach().cpu().contiguous()
        for number, layer in enumerate(with_parameters)
        for name, tensor in layer.named_parameters()
    }


def read_layers(file: WeightsFile, outputs: int = 1) -> nn.Sequential:
    """Return the layers of a file, see ``LatentHead``; the last may have several outputs."""
    stored = file.read()
    numbers = sorted(int(match[1]) for match in map(_LAYER.fullmatch, stored) if match)
    layers: list[nn.Module] = []
    for number in numbers:
        weight, bias = stored[f"{number}.weight"].float(), stored.get(f"{number}.bias")
        if weight.ndim == 2 and any(isinstance(layer, nn.Conv2d) for layer in layers[-2:]):
            layers.append(nn.Flatten())
        layers += [_layer(number, weight, bias, file), nn.ReLU()]
    if not layers or stored[f"{numbers[-1]}.weight"].shape[0] != outputs or stored[f"{numbers[-1]}.weight"].ndim != 2:
        raise file.unusable(f"it holds {sorted(stored)}")
    return nn.Sequential(*layers[:-1]).eval().requires_grad_(False)


def _layer(number: int, weight: torch.Tensor, bias: torch.Tensor | None, file: WeightsFile) -> nn.Module:
    if weight.ndim == 2:
        layer: nn.Module = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    elif weight.ndim == 4:
        kernel = (weight.shape[2], weight.shape[3])
        layer = nn.Conv2d(weight.shape[1], weight.shape[0], kernel, padding="same", bias=bias is not None)
    else:
        raise file.unusable(f"weight {number} has shape {tuple(weight.shape)}")
    layer.load_state_dict({"weight": weight} | ({} if bias is None else {"bias": bias.float()}))
    return layer
