"""Which rows enter which optimizer update, and reading them from the mapped shards.

A row is one (sample, position): position i is the i-th trained step of a stored chain, or the i-th noise level of a
forward-process sample. Rows that must stay together (a pair, a group) form a unit.

Legend: N samples, B rows of a micro-batch, ... latent dims.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from configs.errors import ConfigError, CorruptError
from models.policies.base import Conditioning
from models.transitions import Grid, Kernel, step_stds
from storage.trajectories.base import TrajectoryShard
from tasks.algorithms.base import Batch, ForwardBatch, ForwardTimes, Requirements, TransitionBatch
from tasks.seeds import derive, generator, permutation


@dataclass(frozen=True, slots=True)
class Row:
    """One (sample, position)."""

    sample: int
    """Index over all samples."""
    position: int
    """Index into the sample's trained steps or noise levels."""


Unit = tuple[Row, ...]


class SampleSet(ABC):
    """The samples of one or more epochs with their advantages; latents stay in the mapped files until asked for."""

    def __init__(self, shards: Sequence[TrajectoryShard], advantages: Mapping[str, float]) -> None:
        """Join samples and advantages by sample id.

        Raises:
            CorruptError: a sample has no advantage.
        """
        self._where = [(shard, row) for shard in shards for row in range(shard.table.num_rows)]
        columns = {name: [v for shard in shards for v in shard.table.column(name).to_pylist()] for name in _COLUMNS}
        self._columns: dict[str, list[Any]] = columns
        self.prompts: list[str] = columns["prompt"]
        missing = [sample for sample in columns["sample_id"] if sample not in advantages]
        if missing:
            raise CorruptError(f"{len(missing)} samples have no advantage, the first is {missing[0]}.")
        self.advantages = np.array([advantages[sample] for sample in columns["sample_id"]], np.float32)
        self._newest = max(columns["epoch"], default=0)
        self._importance: dict[tuple[int, int], float] = {}

    def age(self, sample: int) -> int:
        """Return how many epochs before the newest a sample was rolled out."""
        return int(self._newest - self._columns["epoch"][sample])

    def step(self, row: Row) -> int:
        """Return the denoising step of a row, or the number of its noise level."""
        return row.position

    @abstractmethod
    def positions(self, sample: int) -> int:
        """Return how many rows a sample has."""

    @abstractmethod
    def gather(self, rows: Sequence[Row], device: torch.device, common: Mapping[str, Any]) -> Batch:
        """Return the batch of rows; ``common`` are the fields every batch has but latents and grid."""

    def units(self, requires: Requirements) -> list[Unit]:
        """Return what must stay together; samples of advantage 0 only if the algorithm wants them."""
        live = [s for s in range(len(self._where)) if requires.zero_advantages or self.advantages[s] != 0]
        if requires.unit == "row":
            return [(Row(sample, i),) for sample in live for i in range(self.positions(sample))]
        units = []
        for members in self._groups().values():
            chosen = self._pair(members) if requires.unit == "pair" else members
            if any(self.advantages[sample] != 0 for sample in chosen):
                units += [tuple(Row(sample, i) for sample in chosen) for i in range(self.positions(chosen[0]))]
        return units

    def batch(self, units: Sequence[Unit], size: int, conditioning: Conditioning, prompt_rows: dict[str, int]) -> Batch:
        """Return a micro-batch of a fixed size; missing rows repeat the last one with weight 0.

        Args:
            units: units with at most ``size`` rows together.
            size: rows of the batch.
            conditioning: one row per distinct prompt, on the training device.
            prompt_rows: prompt -> row of ``conditioning``.
        """
        rows = [row for unit in units for row in unit]
        numbers = [number for number, unit in enumerate(units) for _ in unit]
        padding = size - len(rows)
        padded = [*rows, *[rows[-1]] * padding]
        device = next(iter(conditioning.positive.values())).device
        index = torch.tensor([prompt_rows[self.prompts[row.sample]] for row in padded], device=device)
        weights = torch.zeros(size, device=device)
        weights[: len(rows)] = 1
        common = {
            "advantages": _tensor([self.advantages[row.sample] for row in padded], device),
            "conditioning": conditioning.rows(index),
            "weights": weights,
            # Padding is a unit of its own, so that sums over units do not see it.
            "units": torch.tensor([*numbers, *[len(units)] * padding], device=device),
            "importance": _tensor([self._importance.get((row.sample, row.position), 1.0) for row in padded], device),
            "age": torch.tensor([self.age(row.sample) for row in padded], device=device),
            "step": torch.tensor([self.step(row) for row in padded], device=device),
            "keys": tuple((row.sample, row.position) for row in padded),
        }
        return self.gather(padded, device, common)

    def _groups(self) -> dict[tuple[int, str], list[int]]:
        groups: dict[tuple[int, str], list[int]] = {}
        for sample, key in enumerate(zip(self._columns["epoch"], self._columns["group_id"], strict=True)):
            groups.setdefault(key, []).append(sample)
        return groups

    def _pair(self, members: Sequence[int]) -> list[int]:
        ordered = sorted(members, key=lambda sample: float(self.advantages[sample]))
        return [ordered[-1], ordered[0]]

    def _latents(self, sample: int, state: int, payload: str = "latents") -> np.ndarray:
        shard, row = self._where[sample]
        array = shard.array(payload, row)
        chosen: np.ndarray = array[self._columns["states"][sample].index(state) if payload == "latents" else state]
        return chosen


class TransitionSet(SampleSet):
    """Stored stochastic steps."""

    def __init__(
        self, shards: Sequence[TrajectoryShard], advantages: Mapping[str, float], *, kernel: Kernel, means: bool
    ) -> None:
        """Bind to the samples; ``kernel`` gives the noise stds of the schedule, ``means`` asks for stored means."""
        super().__init__(shards, advantages)
        self._means = means
        self._proximal: dict[tuple[int, int], float] = {}
        self._mean_std = self._schedule_mean_std(kernel)

    def positions(self, sample: int) -> int:
        """Return the number of trained steps."""
        return len(self._columns["steps"][sample])

    def step(self, row: Row) -> int:
        """Return the denoising step of a row."""
        return int(self._columns["steps"][row.sample][row.position])

    def stale(self) -> list[Unit]:
        """Return the rows of earlier epochs that can contribute."""
        samples = [s for s in range(len(self._where)) if self.age(s) > 0 and self.advantages[s] != 0]
        return [(Row(sample, i),) for sample in samples for i in range(self.positions(sample))]

    def correct(self, proximal: Mapping[tuple[int, int], float], *, level: str, limit: float) -> None:
        """Make recomputed log-probs the old ones of stale rows, and weight them against the behavior policy.

        Args:
            proximal: (sample, position) -> log-prob under the policy at the epoch's start.
            level: 'step': min(exp(proximal - behavior), limit) per row; 'sequence': of the mean over a sample's rows.
            limit: truncation of the weights.
        """
        behavior = {(s, i): float(self._columns["log_probs"][s][i]) for s, i in proximal}
        gaps = {key: proximal[key] - behavior[key] for key in proximal}
        if level == "sequence":
            by_sample: dict[int, list[float]] = {}
            for (sample, _), gap in gaps.items():
                by_sample.setdefault(sample, []).append(gap)
            gaps = {(sample, i): float(np.mean(by_sample[sample])) for sample, i in gaps}
        self._importance = {key: min(math.exp(gap), limit) for key, gap in gaps.items()}
        self._proximal = dict(proximal)

    def gather(self, rows: Sequence[Row], device: torch.device, common: Mapping[str, Any]) -> Batch:
        """Return the transitions of rows."""
        steps = [self._columns["steps"][row.sample][row.position] for row in rows]
        sigmas = [self._columns["sigmas"][row.sample] for row in rows]
        before = [self._latents(row.sample, step) for row, step in zip(rows, steps, strict=True)]
        after = [self._latents(row.sample, step + 1) for row, step in zip(rows, steps, strict=True)]
        means = [self._latents(row.sample, row.position, "means") for row in rows] if self._means else None
        old = [self._old_log_prob(row) for row in rows]
        return TransitionBatch(
            latents=_stack(before, device),
            next_latents=_stack(after, device),
            grid=Grid(
                _tensor([grid[step] for grid, step in zip(sigmas, steps, strict=True)], device),
                _tensor([grid[step + 1] for grid, step in zip(sigmas, steps, strict=True)], device),
                _tensor([grid[1] for grid in sigmas], device),
            ),
            old_log_probs=_tensor(old, device),
            mean_std=torch.full((len(rows),), self._mean_std, device=device),
            old_means=None if means is None else _stack(means, device),
            **common,
        )

    def _old_log_prob(self, row: Row) -> float:
        stored = self._columns["log_probs"][row.sample][row.position]
        return float(self._proximal.get((row.sample, row.position), stored))

    def _schedule_mean_std(self, kernel: Kernel) -> float:
        trained = sorted({step for steps in self._columns["steps"] for step in steps})
        if not trained or not self._columns["sigmas"]:
            return 1.0
        return float(step_stds(kernel, torch.tensor(self._columns["sigmas"][0]))[trained].mean())


class ForwardSet(SampleSet):
    """Final latents, noised anew to levels drawn from the run's seed."""

    def __init__(
        self, shards: Sequence[TrajectoryShard], advantages: Mapping[str, float], *, times: ForwardTimes, seed: int
    ) -> None:
        """Bind to the samples; levels and noise are drawn from ``seed``, which names run and epoch."""
        super().__init__(shards, advantages)
        self._times = times
        self._seed = seed

    def positions(self, sample: int) -> int:
        """Return the number of noise levels."""
        return self._times.count

    def gather(self, rows: Sequence[Row], device: torch.device, common: Mapping[str, Any]) -> Batch:
        """Return the noised samples of rows."""
        final = [len(self._columns["sigmas"][row.sample]) - 1 for row in rows]
        clean = _stack([self._latents(row.sample, state) for row, state in zip(rows, final, strict=True)], device)
        noise = torch.stack([self._noise(row, tuple(clean.shape[1:])) for row in rows]).to(device)
        sigma = _tensor([self._level(row) for row in rows], device)
        level = sigma.reshape(-1, *([1] * (clean.ndim - 1)))
        return ForwardBatch(
            latents=(1 - level) * clean + level * noise,
            grid=Grid(sigma, torch.zeros_like(sigma), sigma),
            clean=clean,
            noise=noise,
            **common,
        )

    def _key(self, row: Row) -> str:
        return str(self._columns["group_id" if self._times.shared else "sample_id"][row.sample])

    def _noise(self, row: Row, shape: tuple[int, ...]) -> Tensor:
        position = 0 if self._times.constant_noise else row.position
        return torch.randn(shape, generator=generator(derive(self._seed, "forward noise", self._key(row), position)))

    def _level(self, row: Row) -> float:
        times, count = self._times, self._times.count
        draw = np.random.Generator(np.random.PCG64(derive(self._seed, "forward level", self._key(row), row.position)))
        if times.kind == "stratified":
            return float(times.low + (times.high - times.low) * (row.position + draw.random()) / count)
        if times.kind == "logit_normal":
            return float(1 / (1 + np.exp(-draw.standard_normal())))
        grid = self._columns["sigmas"][row.sample][:-1]
        order = permutation(len(grid), self._seed, "forward level", self._key(row))
        return float(grid[order[row.position % len(grid)]])


_COLUMNS = ("sample_id", "group_id", "epoch", "prompt", "steps", "states", "log_probs", "sigmas")


def plan_updates(units: Sequence[Unit], *, updates: int, inner_epochs: int, seed: int, epoch: int) -> list[list[Unit]]:
    """Return the units of every optimizer update, in order.

    Each inner epoch is a seeded permutation of all units cut into ``updates`` nearly equal parts; empty parts are left
    out. The order does not depend on ranks or restarts.
    """
    plan: list[list[Unit]] = []
    for inner in range(inner_epochs):
        order = permutation(len(units), seed, "rows", epoch, inner)
        plan += [[units[i] for i in part] for part in np.array_split(order, updates) if len(part)]
    return plan


def micro_batches(units: Sequence[Unit], size: int) -> list[list[Unit]]:
    """Return consecutive units packed into micro-batches of at most ``size`` rows.

    Raises:
        ConfigError: a unit is larger than a micro-batch.
    """
    packed: list[list[Unit]] = [[]]
    room = size
    for unit in units:
        if len(unit) > size:
            raise ConfigError(
                f"execution.micro_batch_size is {size}, but this algorithm compares {len(unit)} samples in "
                f"one forward. Set it to {len(unit)} or more."
            )
        if len(unit) > room:
            packed.append([])
            room = size
        packed[-1].append(unit)
        room -= len(unit)
    return [units for units in packed if units]


def _tensor(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(np.asarray(values, np.float32), device=device)


def _stack(arrays: Sequence[np.ndarray], device: torch.device) -> Tensor:
    return torch.from_numpy(np.stack(arrays)).to(device).float()
