"""JPEG size as a reward: deterministic and without a model, useful to try a pipeline."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from PIL import Image

from flowmill.models.rewards.base import Metadata, Needs, Scores


@dataclass(frozen=True, slots=True, kw_only=True)
class JpegCompressibility:
    """Minus the JPEG size in kB (1000 bytes) at quality 95, over ``scale``. DDPO (arXiv 2305.13301) uses scale 1,
    Flow-GRPO's ``rewards.py:jpeg_compressibility`` 500."""

    needs: ClassVar[Needs] = Needs(media="images")
    sign: ClassVar[int] = -1

    scale: float = 500.0
    """Kilobytes that make a score of -1."""

    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Metadata) -> Scores:
        """Return one score per (H, W, 3) uint8 image."""
        return Scores(np.array([self.sign * _jpeg_kilobytes(image) / self.scale for image in media], np.float32))


@dataclass(frozen=True, slots=True, kw_only=True)
class JpegIncompressibility(JpegCompressibility):
    """The JPEG size in kB (1000 bytes) at quality 95, over ``scale``. DDPO (arXiv 2305.13301) and Flow-GRPO's
    ``rewards.py:jpeg_incompressibility`` use scale 1."""

    sign: ClassVar[int] = 1

    scale: float = 1.0
    """Kilobytes that make a score of 1."""


def _jpeg_kilobytes(image: np.ndarray) -> float:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="JPEG", quality=95)
    return len(buffer.getvalue()) / 1000
