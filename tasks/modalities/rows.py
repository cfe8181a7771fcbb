"""Which rows enter which optimizer update, as arrays of integers: planning an epoch costs little at any size.

A row is one (sample, position): position i is the i-th trained step of a stored chain, or the i-th noise level of a
forward-process sample. Rows that must stay together (a pair, a group) form a unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from configs.errors import ConfigError
from tasks.runs.seeds import permutation


@dataclass(frozen=True, slots=True)
class Units:
    """A sequence of units."""

    rows: np.ndarray
    """(R, 2) int64: sample and position of every row, unit after unit."""
    bounds: np.ndarray
    """(U + 1,) int64: unit i has the rows bounds[i] to bounds[i + 1]."""

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def sizes(self) -> np.ndarray:
        """(U,) rows of each unit."""
        return np.diff(self.bounds)

    def take(self, order: np.ndarray) -> Units:
        """Return some units, in the order of their numbers (N,)."""
        sizes = self.sizes[order]
        bounds = np.concatenate([[0], np.cumsum(sizes)])
        # Row j of the result is row (j - its unit's new start) of the unit it belongs to.
        inner = np.arange(bounds[-1]) - np.repeat(bounds[:-1], sizes)
        return Units(self.rows[np.repeat(self.bounds[:-1][order], sizes) + inner], bounds)

    def slice(self, start: int, stop: int) -> Units:
        """Return the units from ``start`` to ``stop``."""
        bounds = self.bounds[start : stop + 1]
        return Units(self.rows[bounds[0] : bounds[-1]], bounds - bounds[0])


def single_rows(samples: np.ndarray, positions: np.ndarray) -> Units:
    """Return one unit per row: sample s (N,) has positions[s] of them."""
    counts = positions[samples]
    total = int(counts.sum())
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    rows = np.stack([np.repeat(samples, counts), np.arange(total) - starts], axis=1)
    return Units(rows.astype(np.int64).reshape(-1, 2), np.arange(total + 1))


def rows_among(units: Units, plan: Sequence[Units]) -> Units:
    """Return the units of one row each whose rows are in some of a plan."""
    wanted = {key for part in plan for key in map(tuple, part.rows.tolist())}
    kept = [number for number, key in enumerate(map(tuple, units.rows.tolist())) if key in wanted]
    return units.take(np.asarray(kept, np.int64))


def joint_rows(members: Sequence[Sequence[int]], positions: np.ndarray) -> Units:
    """Return one unit per position of the samples in each entry of ``members``, which all have equally many."""
    blocks = [
        np.stack(np.broadcast_arrays(np.asarray(samples)[None, :], np.arange(count)[:, None]), axis=2)
        for samples in members
        for count in (int(positions[samples[0]]),)
    ]
    sizes = np.concatenate([np.full(len(block), block.shape[1]) for block in blocks]) if blocks else np.zeros(0, int)
    rows = np.concatenate([block.reshape(-1, 2) for block in blocks]) if blocks else np.zeros((0, 2), int)
    return Units(rows.astype(np.int64), np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))


def plan_updates(units: Units, *, updates: int, inner_epochs: int, seed: int, epoch: int) -> list[Units]:
    """Return the units of every optimizer update, in order.

    Each inner epoch is a seeded permutation of all units cut into ``updates`` nearly equal parts; empty parts are left
    out. The order does not depend on shards, ranks or restarts, so the number of updates done is all a resume needs.
    """
    plan: list[Units] = []
    for inner in range(inner_epochs):
        order = permutation(len(units), seed, "rows", epoch, inner)
        plan += [units.take(part) for part in np.array_split(np.asarray(order), updates) if len(part)]
    return plan


def row_counts(size: int) -> list[int]:
    """Return the numbers of rows that micro-batches of at most ``size`` rows may have: sixteenths of it, at least 4.

    Kernels differ with the number of rows, so there are few; one alone would have an update of 1.1 sizes computed as 2.
    """
    unit = max(4, -(-size // 16))
    return sorted({*range(unit, size, unit), size})


def padded(rows: int, size: int) -> int:
    """Return how many rows a micro-batch has that holds so many, at most ``size``: the others only pad."""
    return next(count for count in row_counts(size) if count >= rows)


def micro_batches(units: Units, size: int) -> list[Units]:
    """Return consecutive units packed into as few micro-batches of at most ``size`` rows as can be, of like sizes.

    Raises:
        ConfigError: a unit is larger than a micro-batch.
    """
    largest = int(units.sizes.max(initial=0))
    if largest > size:
        raise ConfigError(
            f"execution.micro_batch_size is {size}, but this algorithm compares {largest} samples in "
            f"one forward. Set it to {largest} or more."
        )
    fewest = len(_packed(units, size))
    for count in row_counts(size):
        packed = _packed(units, count) if count >= largest and count * fewest >= len(units.rows) else []
        if len(packed) == fewest:
            return packed
    return []


def _packed(units: Units, size: int) -> list[Units]:
    packed, start = [], 0
    while start < len(units):
        # The last unit that ends within ``size`` rows of this micro-batch's first.
        stop = int(np.searchsorted(units.bounds, units.bounds[start] + size, side="right")) - 1
        packed.append(units.slice(start, stop))
        start = stop
    return packed
