"""Similarity of two images, without a model.
Legend: H W pixels."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import conv2d

#: Wang et al. 2004 (SSIM), section III-C: a Gaussian window of 11 x 11 with a deviation of 1.5, K1 and K2.
_WINDOW, _DEVIATION, _K1, _K2 = 11, 1.5, 0.01, 0.03
#: Weights of red, green and blue in luma, ITU-R BT.601.
_LUMA = (0.299, 0.587, 0.114)


def pixel_similarity(one: np.ndarray, other: np.ndarray) -> float:
    """Return 1 - the root mean square difference of two (H, W, 3) uint8 images over 255: 1 equal, 0 black and white."""
    apart = np.square(one.astype(np.float64) - other).mean()
    return float(1 - np.sqrt(apart) / 255)


def structural_similarity(one: np.ndarray, other: np.ndarray) -> float:
    """Return the mean SSIM of the luma of two (H, W, 3) uint8 images, -1 to 1 (Wang et al. 2004, equations 13 and 17).
    Only windows that lie within the images count. Raises ValueError if the images are smaller than a window."""
    if min(one.shape[:2]) < _WINDOW:
        raise ValueError(f"SSIM compares windows of {_WINDOW} pixels, but images are {one.shape[1]} x {one.shape[0]}")
    a, b = (torch.from_numpy(image @ np.array(_LUMA))[None, None] for image in (one, other))
    mean_a, mean_b = _windows(a), _windows(b)
    variance_a, variance_b = _windows(a * a) - mean_a**2, _windows(b * b) - mean_b**2
    covariance = _windows(a * b) - mean_a * mean_b
    c1, c2 = (_K1 * 255) ** 2, (_K2 * 255) ** 2
    likeness = (2 * mean_a * mean_b + c1) * (2 * covariance + c2)
    return float((likeness / ((mean_a**2 + mean_b**2 + c1) * (variance_a + variance_b + c2))).mean())


def _windows(values: torch.Tensor) -> torch.Tensor:
    """Return the Gaussian means of (1, 1, H, W) values over all windows within the image."""
    away = torch.arange(_WINDOW, dtype=values.dtype) - _WINDOW // 2
    weights = torch.exp(-(away**2) / (2 * _DEVIATION**2))
    weights = weights / weights.sum()
    return conv2d(conv2d(values, weights.view(1, 1, -1, 1)), weights.view(1, 1, 1, -1))


def sized_as(image: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return an (h, w, 3) uint8 image scaled to the height and width of another, unchanged if they are equal."""
    if image.shape == other.shape:
        return image
    return np.array(Image.fromarray(image).resize((other.shape[1], other.shape[0]), Image.Resampling.BICUBIC))
