"""Descriptions of arrays in tables, checked before memory is interpreted: stored data may be untrusted."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
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


def array_entry(name: str, array: np.ndarray, offset: int) -> dict[str, Any]:
    """Return the entry of ``schema.SAMPLES`` for one stored array."""
    return {
        "name": name,
        "dtype": _named(array.dtype),
        "shape": list(array.shape),
        "offset": offset,
        "size": array.nbytes,
    }


@lru_cache
def _named(dtype: np.dtype[Any]) -> str:
    """Return a dtype's name, cached, as NumPy computes it each time."""
    return str(dtype)
