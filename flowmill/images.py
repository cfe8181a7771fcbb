"""Converts stored images and clips to Pillow images."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

    from storage.artifacts.commit import ArtifactStore
    from storage.layout import ArtifactRef


def pictures(store: ArtifactStore, ref: ArtifactRef, samples: Collection[str] | None) -> dict[str, Image | list[Image]]:
    """Return the images, or frames of clips, of an artifact by sample id; all samples when None."""
    from tasks.reports.reading import media_of

    return {sample: picture(media) for sample, media in media_of(store, ref, samples).items()}


def picture(media: np.ndarray) -> Image | list[Image]:
    """Return (H, W, 3) uint8 as an image, or (F, H, W, 3) as the frames of a clip."""
    from PIL import Image

    return [Image.fromarray(frame) for frame in media] if media.ndim == 4 else Image.fromarray(media)
