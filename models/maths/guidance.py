"""Classifier-free guidance. Pure: tensors in, tensors out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def guided(negative: Tensor, positive: Tensor, scale: float) -> Tensor:
    """Return negative + scale (positive - negative) (arXiv 2207.12598, as every diffusers pipeline writes it)."""
    return negative + scale * (positive - negative)


def norm_preserving_guided(negative: Tensor, positive: Tensor, scale: float) -> Tensor:
    """Return the guided prediction rescaled to the positive one's norm along the last dim.

    Qwen-Image's form (diffusers ``QwenImagePipeline``; Flow-GRPO ``train_qwenimage.py:compute_log_prob``): each packed
    token keeps the length of the conditional prediction and takes the direction of the guided one.
    """
    combined = guided(negative, positive, scale)
    lengths: Tensor = torch.linalg.vector_norm(positive, dim=-1, keepdim=True)
    rescaled: Tensor = combined * (lengths / torch.linalg.vector_norm(combined, dim=-1, keepdim=True))
    return rescaled
