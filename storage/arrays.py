"""Checks of array descriptions from tables before memory is interpreted: the data may be untrusted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def stored_dtype(dtype: str, shape: Sequence[int]) -> np.dtype[Any]:
    """Return the dtype of an array of plain numbers from its description in a table.

    Args:
        dtype: dtype in the table.
        shape: shape in the table.

    Raises:
        ValueError: the description is of no numeric array; NumPy would read object arrays as memory addresses.
    """
    try:
        kind = np.dtype(dtype)
        # Allocates no memory, and refuses shapes that NumPy cannot hold.
        np.broadcast_to(np.zeros((), kind), shape)
    except (TypeError, ValueError):
        kind = np.dtype(object)
    if kind.kind not in "biuf":
        raise ValueError(f"there are no arrays of type {str(dtype)[:100]} and shape {list(shape)[:8]}")
    return kind
