"""Sizes of published models, without their weights, from ``published.yaml``.

Legend: W width, F inner width of the feed-forwards, L tokens of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

import yaml


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """Sizes that decide the memory of a transformer that reads images, texts or both; those of its largest part."""

    width: int
    """W."""
    inner: int
    """F."""
    tokens: int = 0
    """L, where it is fixed."""
    parameters: int = 0
    """Parameters of all parts."""
    heads: int = 0
    """Heads whose attention scores are materialized, as T5's are; 0: scores are never stored."""
    retained: int = 0
    """Layers whose outputs are retained until the last is computed."""
    layers: int | None = None
    """Number of layers that gradients pass through; None: unknown."""
    embedded: int = 0
    """Parameters of embeddings and heads of text encoders, which are not quantized."""

    def row(self, tokens: int, number: int) -> int:
        """Return the peak bytes of reading ``tokens`` tokens, with ``number`` bytes per number."""
        # The peak is in a feed-forward: five tensors of its width (the input, the residual, the norm and copies of
        # both), and three of its inner width (the activation's input, its gate or sigmoid, its output).
        layer = tokens * (5 * self.width + 3 * self.inner) * number
        # Scores, and their softmax in float32 and back.
        return layer + self.retained * tokens * self.width * number + self.heads * tokens**2 * (2 * number + 4)

    def followed(self, tokens: int, number: int) -> int | None:
        """Return an upper bound of the bytes with a gradient, for which a layer keeps no more than its peak; None if
        the number of layers is unknown."""
        return None if self.layers is None else self.layers * self.row(tokens, number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Sizes that decide the memory of a pipeline."""

    denoiser: str
    """diffusers class of the denoiser."""
    vae: Mapping[str, Any]
    """Class and arguments of the autoencoder."""
    text: Transformer
    """The largest text encoder."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that differ from the class's defaults."""
    denoisers: int = 1
    """Number of denoisers."""
    latents: tuple[int, int, int] = (16, 8, 1)
    """Latent channels, and pixels per side and frames of a latent; the first latent of a clip is one frame."""
    text_tokens: int = 512
    """Text tokens, for models that attend to text and latents together."""
    further_text: int = 0
    """The text tokens among these that no setting changes."""
    patch: int = 2
    """Latents per side of a token."""
    image_tokens: bool = False
    """The prompt's source image is appended to the generated tokens, with as many tokens."""
    text_parameters: int = 0
    """Parameters of all text encoders, of connectors between them and the denoiser, and of image encoders where prompts
    come with images."""
    sound_parameters: int = 0
    """Parameters of the autoencoder of sound and its vocoder."""

    def latent_frames(self, frames: int) -> int:
        """Return the number of latent frames of a clip."""
        return (frames - 1) // self.latents[2] + 1

    def tokens(self, *, height: int, width: int, frames: int, references: int = 0) -> int:
        """Return the tokens of one row, without text; ``references``: pixels of its reference images."""
        unit = self.latents[1] * self.patch
        count = self.latent_frames(frames) * (height // unit) * (width // unit)
        return count * (2 if self.image_tokens else 1) + references // unit**2


@cache
def published(section: str) -> dict[str, Mapping[str, Any]]:
    """Return a section of the table."""
    # Constructors take tuples, which YAML lacks.
    return {name: _tuples(fields) for name, fields in _table()[section].items()}


@cache
def pipelines() -> dict[str, Architecture]:
    """Return the architectures of published pipelines by id on the hub."""
    return {
        path: Architecture(**{**of_class(fields["denoiser"]), **fields, "text": Transformer(**fields["text"])})
        for path, fields in published("pipelines").items()
    }


@cache
def encoders() -> dict[str, Transformer]:
    """Return the models of rewards by id on the hub."""
    return {path: Transformer(**fields) for path, fields in published("rewards").items()}


def of_class(denoiser: str, config: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the fields of an architecture that follow from the class of its denoiser, and from a folder's config."""
    fields = dict(published("denoisers").get(denoiser, published("denoisers")["default"]))
    if fields.pop("patched", False) and config is not None:
        fields["patch"] = config.get("patch_size", 2)
    return fields


@cache
def _table() -> Mapping[str, Any]:
    table: Mapping[str, Any] = yaml.safe_load(files("flowmill.models.memory").joinpath("published.yaml").read_text())
    return table


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _tuples(each) for name, each in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
