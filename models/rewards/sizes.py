"""Memory of reward models without loading them: from their files, or as published."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.library_loading import read_json
from models.memory.architectures import stored_numbers
from models.memory.published import Transformer, encoders
from models.policies.pipeline_configs import whole

#: Prefix of the names of a layer's tensors.
_LAYER = re.compile(r".*?\.(layers|layer|blocks)\.\d+\.")
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
    """Peak activations of a row with gradients; None: not known."""
    layers: int = 0
    """Weights in layers, which ranks may shard."""
    layer: int = 0
    """Weights of the largest layer."""

    def of_rank(self, ranks: int) -> int:
        """Return the bytes of the weights on one of the ranks that shard them.

        The layer that computes is there whole, and a second time in ``fully_shard``'s receive buffer.
        """
        return self.weights - self.layers + self.layers // ranks + 2 * self.layer


def transformer_takes(path: str, dtype: str) -> Takes | None:
    """Return the memory of a transformer by folder or hub id, see ``encoder_of``."""
    known, number = encoder_of(path), BYTES[dtype]
    return (
        None
        if known is None
        else Takes(
            weights=known.parameters * number,
            row=known.row(known.tokens, number),
            followed=known.followed(known.tokens, number),
            layers=known.layered * number,
            layer=known.largest * number,
        )
    )


def encoder_of(path: str) -> Transformer | None:
    """Return the sizes of a model by folder or hub id; None for an unknown one without files.

    Raises:
        ConfigError: a file of the folder cannot be read.
    """
    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file():
        return encoders().get(path)
    with whole(folder):
        about, stored = read_json(folder / "config.json"), stored_numbers(folder)
    part: Mapping[str, Any] = about.get("vision_config") or about
    width, inner = part.get("hidden_size"), part.get("intermediate_size")
    if not isinstance(width, int) or not isinstance(inner, int):
        return None
    gates = 2 if part.get("hidden_act", "quick_gelu") == "quick_gelu" else 1
    layers = part.get("num_hidden_layers")
    by_layer: Counter[str] = Counter()
    for name, count in stored.items():
        if found := _LAYER.match(name):
            by_layer[found[0]] += count
    return Transformer(
        parameters=sum(stored.values()),
        tokens=_tokens(part),
        width=width,
        inner=inner,
        layers=layers if isinstance(layers, int) else None,
        gates=gates,
        layered=by_layer.total(),
        largest=max(by_layer.values(), default=0),
    )


def _tokens(part: Mapping[str, Any]) -> int:
    if "image_size" in part and "patch_size" in part:
        return int(part["image_size"] // part["patch_size"]) ** 2 + 1
    # Texts have as many tokens as the model takes, but no more than a long answer.
    return min(int(part.get("max_position_embeddings", 512)), 4096)
