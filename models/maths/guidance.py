"""Classifier-free guidance. Pure: tensors in, tensors out."""

from __future__ import annotations

import torch
from torch import Tensor


def guided(negative: Tensor, positive: Tensor, scale: float) -> Tensor:
    """Return negative + scale (positive - negative) (arXiv 2207.12598, as every diffusers pipeline writes it)."""
    return negative + scale * (positive - negative)


def norm_preserving_guided(negative: Tensor, positive: Tensor, scale: float) -> Tensor:
    """Return the guided prediction rescaled to the positive one's norm along the last dim. Qwen-Image's form (diffusers
    ``QwenImagePipeline``; Flow-GRPO ``train_qwenimage.py:compute_log_prob``): each packed token keeps the length of the
    conditional prediction and takes the direction of the guided one."""
    combined = guided(negative, positive, scale)
    lengths: Tensor = torch.linalg.vector_norm(positive, dim=-1, keepdim=True)
    return combined * _share(lengths, torch.linalg.vector_norm(combined, dim=-1, keepdim=True))


def rescaled_guided(negative: Tensor, positive: Tensor, scale: float, rescale: float) -> Tensor:
    """Return the guided prediction, interpolated by ``rescale`` to one with the positive prediction's std per row. See
    arXiv 2305.08891, section 3.4, and diffusers ``rescale_noise_cfg``: guidance makes predictions larger, and images
    overexposed."""
    combined, dims = guided(negative, positive, scale), tuple(range(1, positive.ndim))
    rescaled = combined * _share(positive.std(dim=dims, keepdim=True), combined.std(dim=dims, keepdim=True))
    return rescale * rescaled + (1 - rescale) * combined


def _share(length: Tensor, current: Tensor) -> Tensor:
    """Return length / current, and 1 where current is 0."""
    nothing = current < torch.finfo(current.dtype).tiny
    return torch.where(nothing, 1.0, length / torch.where(nothing, 1.0, current))
