"""The share of an image that is neither overexposed nor black: a monitor for rewards that prefer bright images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from flowmill.models.rewards.base import Bounds, Metadata, Needs, Scores

#: ITU-R BT.601, as JPEG and Pillow's mode L have it.
_LUMA = np.array([0.299, 0.587, 0.114], np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposure:
    """The share of pixels whose luma lies within bounds; it falls first when a policy overexposes."""

    needs: ClassVar[Needs] = Needs(media="images")
    bounds: ClassVar[Bounds] = (0.0, 1.0)

    low: float = 8.0
    """Luma below which a pixel is black, of 255."""
    high: float = 247.0
    """Luma above which a pixel is overexposed, of 255."""

    def __post_init__(self) -> None:
        """Check the options; raise ValueError if the bounds are out of order or range."""
        if not 0 <= self.low < self.high <= 255:
            raise ValueError(f"low is {self.low} and high {self.high}; they must be 0 <= low < high <= 255.")

    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Metadata) -> Scores:
        """Return one score per (H, W, 3) uint8 image, 0 to 1, and the mean luma."""
        luma = [image.astype(np.float32) @ _LUMA for image in media]
        shares = [float(np.mean((each >= self.low) & (each <= self.high))) for each in luma]
        return Scores(np.array(shares, np.float32), [f"mean luma {each.mean():.0f}" for each in luma])
