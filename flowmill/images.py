"""Converts stored images and clips to Pillow images."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image


def picture(media: np.ndarray) -> Image | list[Image]:
    """Return (H, W, 3) uint8 as an image, or (F, H, W, 3) as the frames of a clip."""
    from PIL import Image

    return [Image.fromarray(frame) for frame in media] if media.ndim == 4 else Image.fromarray(media)
