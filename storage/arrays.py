"""What a table says of an array, checked before memory is read as one: it may be anybody's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def stored_dtype(dtype: str, shape: Sequence[int]) -> np.dtype[Any]:
    """Return the dtype of an array of plain numbers that a table describes.

    Args:
        dtype: as the table has it.
        shape: likewise.

    Raises:
        ValueError: no array of numbers is like that. Bytes that are read as objects are addresses.
    """
    try:
        kind = np.dtype(dtype)
        # Takes no memory, and refuses what NumPy cannot hold.
        np.broadcast_to(np.zeros((), kind), shape)
    except (TypeError, ValueError):
        kind = np.dtype(object)
    if kind.kind not in "biuf":
        raise ValueError(f"there are no arrays of type {str(dtype)[:100]} and shape {list(shape)[:8]}")
    return kind
