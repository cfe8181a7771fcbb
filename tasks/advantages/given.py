"""Advantages of given samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from configs.data import DataSection


def given_advantages(ratings: np.ndarray, section: DataSection) -> np.ndarray:
    """Return (N,) float32 advantages of (N,) ratings, NaN where there is none: 1 for chosen samples and for samples
    without ratings, -1 for rejected ones; a rating counts from its neutral value, in halves of the scale."""
    low, high = (0.0, 1.0) if section.paired else section.scale
    middle = 0.5 if section.paired else section.middle
    found = (ratings.astype(np.float64) - middle) / ((high - low) / 2)
    return np.where(np.isnan(found), 1.0, found).astype(np.float32)


def can_train(advantages: np.ndarray, groups: Sequence[str], unit: str) -> bool:
    """Return whether a row has an advantage, or, with another ``unit``, a group has different ones.

    Args:
        advantages: (N,).
        groups: the group of each row.
        unit: see ``tasks.algorithms.base.Requirements.unit``.
    """
    if unit == "row":
        return bool(advantages.any())
    first: dict[str, float] = {}
    return any(
        first.setdefault(group, value) != value for group, value in zip(groups, advantages.tolist(), strict=True)
    )
