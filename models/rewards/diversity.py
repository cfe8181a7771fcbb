"""Distance of a sample to the others of its group: as a monitor it detects a policy with one image per prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from flowmill.configs.path_types import ModelPlace
from flowmill.models.rewards.base import Bounds, Metadata, Needs, Scores
from flowmill.models.rewards.clip import CLIP_L, ClipEmbeddings

#: Distance to which of the others.
Others = Literal["mean", "nearest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelDiversity:
    """Root mean square difference of pixels to the other samples of the group, 0 to 1."""

    needs: ClassVar[Needs] = Needs(media="images", groupwise=True)
    bounds: ClassVar[Bounds] = (0.0, 1.0)

    to: Others = "mean"
    """The mean over the others, or the difference to the nearest of them."""

    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Metadata) -> Scores:
        """Return one score per (H, W, 3) uint8 image of a group; 0 for one without others."""
        flat = media.reshape(len(media), -1).astype(np.float32) / 255
        # One image against all others at a time: memory does not suffice for all pairs of large images.
        rows = [np.sqrt(np.square(flat - one).mean(1, dtype=np.float64)) for one in flat]
        return Scores(_OTHERS[self.to](np.stack(rows)))


@dataclass(kw_only=True)
class EmbeddingDiversity(ClipEmbeddings):
    """1 - cosine of CLIP's embeddings to the other samples of the group."""

    name: ClassVar[str] = "clip_diversity"
    needs: ClassVar[Needs] = Needs(media="images", groupwise=True, accelerated=True)

    model: ModelPlace = CLIP_L
    to: Others = "mean"
    """The mean over the others, or the distance to the nearest of them (GARDO's, of DINOv3's embeddings)."""

    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Metadata) -> Scores:
        """Return one score per (H, W, 3) uint8 image of a group; 0 for one without others."""
        embeddings = self.of_images(media).double()
        return Scores(_OTHERS[self.to]((1 - embeddings @ embeddings.T).cpu().numpy()))


def mean_to_others(distances: np.ndarray) -> np.ndarray:
    """Return the mean of (K, K) distances to the K - 1 others, (K,) float32; 0 where there are none."""
    others = max(1, len(distances) - 1)
    return ((distances.sum(1) - np.diagonal(distances)) / others).astype(np.float32)


def nearest_other(distances: np.ndarray) -> np.ndarray:
    """Return the smallest of (K, K) distances to the K - 1 others, (K,) float32; 0 where there are none."""
    if len(distances) < 2:
        return np.zeros(len(distances), np.float32)
    apart: np.ndarray = np.where(np.eye(len(distances), dtype=bool), np.inf, distances).min(1)
    return apart.astype(np.float32)


_OTHERS = {"mean": mean_to_others, "nearest": nearest_other}
