"""How unlike the others of its group a sample is: as a monitor it tells when a policy makes one picture per prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from models.rewards.base import Needs, Scores
from models.rewards.clip import CLIP_L, ClipEmbeddings


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelDiversity:
    """Root mean square difference of pixels to the other samples of the group, mean over them, 0 to 1."""

    needs: ClassVar[Needs] = Needs(groupwise=True)

    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Scores:
        """Return one score per (H, W, 3) uint8 image of a group; 0 for one without others."""
        flat = media.reshape(len(media), -1).astype(np.float32) / 255
        # One image against all others at a time: a group of large images has no room for all pairs.
        rows = [np.sqrt(np.square(flat - one).mean(1, dtype=np.float64)) for one in flat]
        return Scores(mean_to_others(np.stack(rows)))


@dataclass(kw_only=True)
class EmbeddingDiversity(ClipEmbeddings):
    """1 - cosine of CLIP's embeddings to the other samples of the group, mean over them."""

    name: ClassVar[str] = "clip_diversity"
    needs: ClassVar[Needs] = Needs(groupwise=True, accelerated=True)

    model: str = CLIP_L

    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Scores:
        """Return one score per (H, W, 3) uint8 image of a group; 0 for one without others."""
        embeddings = self.of_images(media).double()
        return Scores(mean_to_others((1 - embeddings @ embeddings.T).cpu().numpy()))


def mean_to_others(distances: np.ndarray) -> np.ndarray:
    """Return the mean of (K, K) distances to the K - 1 others, (K,) float32; 0 where there are none."""
    others = max(1, len(distances) - 1)
    apart: np.ndarray = ((distances.sum(1) - np.diagonal(distances)) / others).astype(np.float32)
    return apart
