"""Conditioning of a small model's row, widened to the shapes of a large model of the family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

#: Names of conditioning widths in denoisers' configs.
_SEQUENCES = (
    *("joint_attention_dim", "text_dim", "cap_feat_dim", "caption_channels", "cross_attention_dim", "image_dim"),
    *("text_embed_dim", "text_embed_2_dim", "context_in_dim", "image_embed_dim"),
)


def as_wide(
    rows: Mapping[str, Tensor], small: Mapping[str, Any], large: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return rows of a small model's conditioning in the shapes of a large one, in the storage dtype.

    Args:
        rows: (1, ...) each, of a short prompt.
        small: config of the small denoiser.
        large: config of the large one.
        dtype: dtype of the model.
    """
    wider = {name: _as_for(name, row, small, large, dtype) for name, row in rows.items()}
    if "text_length" in wider:
        # Texts of variable length count with the maximum length.
        wider["text_length"] = torch.full_like(wider["text_length"], wider["prompt_embeds"].shape[1])
    return wider


def _as_for(name: str, row: Tensor, small: Mapping[str, Any], large: Mapping[str, Any], dtype: torch.dtype) -> Tensor:
    """Return a row of a small model's conditioning with the width of a large one, in the storage dtype."""
    if not row.is_floating_point():
        return row
    if "latents" in name:
        # Tokens of source images have the width of generated ones.
        width = large["in_channels"] if row.shape[-1] == small.get("in_channels") else row.shape[-1]
        return torch.empty((*row.shape[:-1], width), dtype=dtype)
    widths_of = _vectors if row.ndim == 2 else _sequences
    widths = [
        there for here, there in zip(widths_of(small), widths_of(large), strict=True) if here == row.shape[-1] and there
    ]
    return torch.empty((*row.shape[:-1], widths[0] if widths else row.shape[-1]), dtype=dtype)


def _sequences(config: Mapping[str, Any]) -> list[int | None]:
    return [config.get(key) for key in _SEQUENCES]


def _vectors(config: Mapping[str, Any]) -> list[int | None]:
    # SDXL appends the embeddings of six numbers to its pooled text.
    joined, each = config.get("projection_class_embeddings_input_dim"), config.get("addition_time_embed_dim")
    return [config.get("pooled_projection_dim"), joined - 6 * each if joined and each else None]
