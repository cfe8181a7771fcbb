"""Advantages of samples of data, from their ratings."""

from __future__ import annotations

import numpy as np

from flowmill.configs.data import DataSection


def advantages_of_ratings(ratings: np.ndarray, section: DataSection) -> np.ndarray:
    """Return (N,) float32 advantages of (N,) ratings, NaN where there is none: 1 for chosen samples and for samples
    without ratings, -1 for rejected ones; a rating counts from its neutral value, in halves of the scale."""
    low, high = (0.0, 1.0) if section.paired else section.scale
    middle = 0.5 if section.paired else section.middle
    advantages = (ratings.astype(np.float64) - middle) / ((high - low) / 2)
    return np.where(np.isnan(advantages), 1.0, advantages).astype(np.float32)
