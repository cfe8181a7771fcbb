"""Memory of reward models without loading them: from their files, or as published.

Legend: W width, F inner width of the feed-forwards, L tokens of a row.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.library_loading import read_json
from models.memory.architectures import stored_numbers
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """Sizes of a transformer that encodes images, texts or both; those of a layer are of its larger part."""

    parameters: int
    """Parameters of all parts."""
    tokens: int
    """L."""
    width: int
    """W."""
    inner: int
    """F."""
    layers: int | None = None
    """Number of layers that gradients pass through."""
    gates: int = 1
    """Copies of the inner width that a layer's activation keeps for a gradient: 1 for GELU, 2 for its quick form."""
    layered: int = 0
    """Parameters in layers."""
    largest: int = 0
    """Parameters of the largest layer."""

    def takes(self, dtype: str) -> Takes:
        """Return its memory in a dtype."""
        number = BYTES[dtype]
        # The peak is in a feed-forward: five tensors of its width (the input, the residual, the norm and copies of
        # both), and three of its inner width (the activation's input, its gate or sigmoid, its output).
        row = self.tokens * (5 * self.width + 3 * self.inner) * number
        # Every layer keeps inputs and outputs of both norms, three projections, and the output of attention.
        kept = None if self.layers is None else self.tokens * self.layers * (6 * self.width + self.gates * self.inner)
        followed = None if kept is None else kept * number + row
        return Takes(
            weights=self.parameters * number,
            row=row,
            followed=followed,
            layers=self.layered * number,
            layer=self.largest * number,
        )


CLIP_L = Encoder(
    parameters=427_616_513,
    tokens=257,
    width=1024,
    inner=4096,
    layers=24,
    gates=2,
    layered=387_363_840,
    largest=12_596_224,
)
CLIP_H = Encoder(
    parameters=986_109_441,
    tokens=257,
    width=1280,
    inner=5120,
    layers=32,
    layered=931_987_456,
    largest=19_677_440,
)
#: Sizes by id on the hub; parameters are the loaded ones.
PUBLISHED: Mapping[str, Encoder] = {
    "openai/clip-vit-large-patch14": CLIP_L,
    "laion/CLIP-ViT-H-14-laion2B-s32B-b79K": CLIP_H,
    "yuvalkirstain/PickScore_v1": CLIP_H,
    # Without the language model's head; tokens of a clip of ten frames and its question.
    "Qwen/Qwen2-VL-2B-Instruct": Encoder(
        parameters=2_208_985_600,
        tokens=2048,
        width=1536,
        inner=8960,
        layered=1_940_017_152,
        largest=46_797_824,
    ),
    # Twice the 256 tokens of the image and as many of the question.
    "Qwen/Qwen2-VL-7B-Instruct": Encoder(
        parameters=7_744_923_136,
        tokens=1024,
        width=3584,
        inner=18944,
        layered=7_155_296_256,
        largest=233_057_792,
    ),
}


def encoder_of(path: str) -> Encoder | None:
    """Return the sizes of a model by folder or hub id; None for an unknown one without files.

    Raises:
        ConfigError: a file of the folder cannot be read.
    """
    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file():
        return PUBLISHED.get(path)
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
    return Encoder(
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
