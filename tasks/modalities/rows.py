"""Assigns rows to optimizer updates, as arrays of integers, so planning is cheap for epochs of any size.

A row is one (sample, position): position i is the i-th trained step of a stored chain, or the i-th noise level of a
forward-process sample. Rows that must stay together (a pair, a group) form a unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flowmill.configs.errors import ConfigError
from flowmill.tasks.runs.seeds import permutation


@dataclass(frozen=True, slots=True)
class Units:
    """A sequence of units."""

    rows: np.ndarray
    """(R, 2) int64: sample and position of each row, unit after unit."""
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
        # Row j of the result is row (j - the new start of its unit) of that unit.
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
    rows = np.empty((total, 2), np.int64)
    rows[:, 0] = np.repeat(samples, counts)
    rows[:, 1] = np.arange(total)
    rows[:, 1] -= np.repeat(np.cumsum(counts) - counts, counts)
    return Units(rows, np.arange(total + 1))


def rows_among(units: Units, plan: Sequence[Units]) -> Units:
    """Return those of the single-row units whose rows are in a plan."""
    keys = {key for part in plan for key in map(tuple, part.rows.tolist())}
    numbers = [number for number, key in enumerate(map(tuple, units.rows.tolist())) if key in keys]
    return units.take(np.asarray(numbers, np.int64))


def joint_rows(members: Sequence[Sequence[int]], positions: np.ndarray) -> Units:
    """Return one unit per entry of ``members`` and position; the samples of an entry have equally many positions."""
    blocks = [
        np.stack(np.broadcast_arrays(np.asarray(samples)[None, :], np.arange(count)[:, None]), axis=2)
        for samples in members
        for count in (int(positions[samples[0]]),)
    ]
    sizes = np.concatenate([np.full(len(block), block.shape[1]) for block in blocks]) if blocks else np.zeros(0, int)
    rows = np.concatenate([block.reshape(-1, 2) for block in blocks]) if blocks else np.zeros((0, 2), int)
    return Units(rows.astype(np.int64), np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))


def plan_updates(units: Units, *, updates: int, inner_epochs: int, seed: int, epoch: int) -> list[Units]:
    """Return the units of each optimizer update, in order.

    Each inner epoch is a seeded permutation of all units, cut into ``updates`` nearly equal parts without empty parts.
    The order does not depend on shards, ranks or restarts, so a resume needs only the number of updates done.
    """
    plan: list[Units] = []
    for inner in range(inner_epochs):
        order = permutation(len(units), seed, "rows", epoch, inner)
        plan += [units.take(part) for part in np.array_split(np.asarray(order), updates) if len(part)]
    return plan


def first_units(plan: Sequence[Units], rows: int) -> Units:
    """Return the first units of a plan that have at most ``rows`` rows together, but at least one unit.

    As the order of a plan is drawn, they are a random part of an epoch.
    """
    sizes = np.concatenate([units.sizes for units in plan])
    count = max(1, int(np.searchsorted(np.cumsum(sizes), rows, side="right")))
    bounds = np.concatenate([[0], np.cumsum(sizes[:count])])
    return Units(np.concatenate([units.rows for units in plan])[: bounds[-1]], bounds)


def row_counts(size: int) -> list[int]:
    """Return the row counts of micro-batches of at most ``size`` rows: multiples of a sixteenth of it, at least 4.

    There are few counts because kernels differ with the number of rows. With a single count, an update of 1.1 times
    ``size`` would be computed as 2.
    """
    unit = max(4, -(-size // 16))
    return sorted({*range(unit, size, unit), size})


def padded(rows: int, size: int) -> int:
    """Return the row count of a micro-batch of at most ``size`` rows that holds ``rows``, padding included."""
    return next(count for count in row_counts(size) if count >= rows)


def micro_batches(units: Units, size: int) -> list[Units]:
    """Return consecutive units packed into the fewest micro-batches of at most ``size`` rows, of similar sizes."""
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
        # The last unit that ends within ``size`` rows of the start of this micro-batch.
        stop = int(np.searchsorted(units.bounds, units.bounds[start] + size, side="right")) - 1
        packed.append(units.slice(start, stop))
        start = stop
    return packed
