"""The turn whose rewards count. Legend: T turns, N samples."""

from __future__ import annotations

import torch
from torch import Tensor


def best_turns(totals: Tensor, drawings: Tensor) -> Tensor:
    """Return the row of each sample's highest total, the first of equal ones, (N,) int64.

    A missing total of a turn that a sample has counts as its highest, so that failures are not passed over.

    Args:
        totals: (T, N) rewards of turns; the last row is of the newest image, whatever turn drew it. NaN if one failed.
        drawings: (N,) turns that drew an image: rows before the last are not read from there on.
    """
    rows = torch.arange(len(totals))[:, None]
    counts = (rows < drawings - 1) | (rows == len(totals) - 1)
    return torch.where(counts, totals, -torch.inf).max(0).indices


def of_turn(values: Tensor, rows: Tensor | None) -> Tensor:
    """Return the values (T, N) of one row per sample, (N,). ``rows``: None takes the only one."""
    return values[0] if rows is None else values.gather(0, rows[None])[0]
