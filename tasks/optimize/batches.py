"""Which (sample, step) rows enter which optimizer update, and reading them from the mapped shards.

Legend: N samples, S trained steps, B rows of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from configs.errors import CorruptError
from models.policies.base import Conditioning
from models.transitions import Grid
from storage.trajectories.base import TrajectoryShard
from tasks.algorithms.base import Batch
from tasks.seeds import permutation


@dataclass(frozen=True, slots=True)
class Row:
    """One trained transition."""

    sample: int
    """Index over all samples of the epoch."""
    position: int
    """Index into the sample's trained steps."""


class TrainingSet:
    """The trajectories of an epoch with their advantages; latents stay in the mapped files until they are asked for."""

    def __init__(self, shards: Sequence[TrajectoryShard], advantages: dict[str, float]) -> None:
        """Join samples and advantages by sample id.

        Raises:
            CorruptError: a sample has no advantage.
        """
        self._where = [(shard, row) for shard in shards for row in range(shard.table.num_rows)]
        columns = {name: [v for shard in shards for v in shard.table.column(name).to_pylist()] for name in _COLUMNS}
        self.steps: list[list[int]] = columns["steps"]
        self.prompts: list[str] = columns["prompt"]
        self._states: list[list[int]] = columns["states"]
        self._log_probs: list[list[float]] = columns["log_probs"]
        self._sigmas: list[list[float]] = columns["sigmas"]
        missing = [sample for sample in columns["sample_id"] if sample not in advantages]
        if missing:
            raise CorruptError(f"{len(missing)} samples have no advantage, the first is {missing[0]}.")
        self.advantages = np.array([advantages[sample] for sample in columns["sample_id"]], np.float32)

    def rows(self, *, with_zero: bool) -> list[Row]:
        """Return every trained transition; those of samples with advantage 0 only if asked for."""
        return [
            Row(sample, position)
            for sample, steps in enumerate(self.steps)
            if with_zero or self.advantages[sample] != 0
            for position in range(len(steps))
        ]

    def batch(self, rows: Sequence[Row], size: int, conditioning: Conditioning, prompt_rows: dict[str, int]) -> Batch:
        """Return a micro-batch of a fixed size; missing rows repeat the last one with weight 0.

        Args:
            rows: at most ``size`` rows.
            size: rows of the batch.
            conditioning: one row per distinct prompt, on the training device.
            prompt_rows: prompt -> row of ``conditioning``.
        """
        padded = [*rows, *[rows[-1]] * (size - len(rows))]
        device = next(iter(conditioning.positive.values())).device
        before, after = zip(*(self._latents(row) for row in padded), strict=True)
        index = torch.tensor([prompt_rows[self.prompts[row.sample]] for row in padded], device=device)
        weights = torch.zeros(size, device=device)
        weights[: len(rows)] = 1
        return Batch(
            latents=torch.from_numpy(np.stack(before)).to(device).float(),
            next_latents=torch.from_numpy(np.stack(after)).to(device).float(),
            grid=self._grid(padded, device),
            old_log_probs=_tensor([self._log_probs[row.sample][row.position] for row in padded], device),
            advantages=_tensor([self.advantages[row.sample] for row in padded], device),
            conditioning=conditioning.rows(index),
            weights=weights,
        )

    def _latents(self, row: Row) -> tuple[np.ndarray, np.ndarray]:
        shard, index = self._where[row.sample]
        latents, states = shard.latents(index), self._states[row.sample]
        at = states.index(self.steps[row.sample][row.position])
        return latents[at], latents[at + 1]

    def _grid(self, rows: Sequence[Row], device: torch.device) -> Grid:
        sigmas = [self._sigmas[row.sample] for row in rows]
        steps = [self.steps[row.sample][row.position] for row in rows]
        return Grid(
            _tensor([grid[step] for grid, step in zip(sigmas, steps, strict=True)], device),
            _tensor([grid[step + 1] for grid, step in zip(sigmas, steps, strict=True)], device),
            _tensor([grid[1] for grid in sigmas], device),
        )


_COLUMNS = ("sample_id", "prompt", "steps", "states", "log_probs", "sigmas")


def plan_updates(rows: Sequence[Row], *, updates: int, inner_epochs: int, seed: int, epoch: int) -> list[list[Row]]:
    """Return the rows of every optimizer update, in order.

    Each inner epoch is a seeded permutation of all rows cut into ``updates`` nearly equal parts; empty parts are left
    out. The order does not depend on ranks or restarts.
    """
    plan: list[list[Row]] = []
    for inner in range(inner_epochs):
        order = permutation(len(rows), seed, "rows", epoch, inner)
        plan += [[rows[i] for i in part] for part in np.array_split(order, updates) if len(part)]
    return plan


def _tensor(values: Sequence[float], device: torch.device) -> torch.Tensor:
    return torch.tensor(np.asarray(values, np.float32), device=device)
