"""Memory of reward models without loading them: from their files, or as published."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flowmill.configs.user_directories import user_path
from flowmill.models.library_loading import read_json
from flowmill.models.memory.architectures import stored_numbers
from flowmill.models.memory.published import Transformer, encoders
from flowmill.models.policies.pipeline_configs import whole

#: Bytes of a number by dtype.
BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Takes:
    """Bytes on a device."""

    weights: int
    """Weights of all models."""
    row: int
    """Peak activations of a row, without weights."""
    followed: int | None = None
    """Peak activations of a row with gradients; None: unknown."""


def transformer_takes(path: str, dtype: str) -> Takes | None:
    """Return the memory of a transformer by folder or hub id, see ``encoder_of``."""
    encoder, number = encoder_of(path), BYTES[dtype]
    return (
        None
        if encoder is None
        else Takes(
            weights=encoder.parameters * number,
            row=encoder.row(encoder.tokens, number),
            followed=encoder.followed(encoder.tokens, number),
        )
    )


def encoder_of(path: str) -> Transformer | None:
    """Return the sizes of a model by folder or hub id; None for an unknown one without files."""
    folder = user_path(path)
    if not (folder / "config.json").is_file():
        return encoders().get(path)
    with whole(folder):
        config, stored = read_json(folder / "config.json"), stored_numbers(folder)
    part: Mapping[str, Any] = config.get("vision_config") or config
    width, inner = part.get("hidden_size"), part.get("intermediate_size")
    if not isinstance(width, int) or not isinstance(inner, int):
        return None
    layers = part.get("num_hidden_layers")
    return Transformer(
        parameters=sum(stored.values()),
        tokens=_tokens(part),
        width=width,
        inner=inner,
        layers=layers if isinstance(layers, int) else None,
    )


def _tokens(part: Mapping[str, Any]) -> int:
    if "image_size" in part and "patch_size" in part:
        return int(part["image_size"] // part["patch_size"]) ** 2 + 1
    # Texts have as many tokens as the model takes, but no more than a long answer.
    return min(int(part.get("max_position_embeddings", 512)), 4096)
