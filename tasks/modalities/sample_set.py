"""Sample sets: join rows with advantages, read them from the shards, and make micro-batches on the training device.

Legend: N samples, B rows of a micro-batch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from flowmill.configs.advantages import ReplaySection
from flowmill.configs.errors import CorruptError
from flowmill.models.devices import moved
from flowmill.storage.trajectories.base import TrajectoryShard
from flowmill.tasks.algorithms.base import Batch, Requirements
from flowmill.tasks.modalities.proximal import Proximal
from flowmill.tasks.modalities.reader import SampleReader
from flowmill.tasks.modalities.rows import Units, joint_rows, single_rows


class SampleSet(ABC):
    """The samples of one or more epochs with their advantages; payloads are read from files on demand."""

    def __init__(
        self,
        shards: Sequence[TrajectoryShard],
        advantages: pa.Table,
        *,
        ahead: int = 0,
        device: torch.device | None = None,
    ) -> None:
        """Join samples and advantages by sample id.

        Args:
            shards: the shards, opened.
            ahead: number of epochs by which the rollout policy is older than the policy before its epoch.
            device: the device of batches; None: the CPU.
        """
        self.device = device or torch.device("cpu")
        self.reader = SampleReader(shards)
        self.earned = _in_order(advantages, self.reader.sample_ids)
        """Rewards and advantages of samples, (N,) rows."""
        self.advantages: np.ndarray = np.array(self.earned.column("advantage").to_numpy())
        """(N,) float32; NaN for samples that are left out."""
        self.rewards: np.ndarray = self.earned.column("reward").to_numpy()
        self.factors: np.ndarray = np.ones(len(self.reader), np.float32)
        """(N,) factor of the loss of each sample."""
        # Policy n is the result of epoch n; epoch n starts from policy n - 1.
        start = int(self.reader.epochs.max(initial=1)) - 1
        self.ages: np.ndarray = start - np.maximum(self.reader.epochs - 1 - ahead, 0)
        """(N,) age of the policy that drew each sample, in epochs before the policy this epoch starts from."""
        self._importance: dict[tuple[int, int], float] = {}
        self._replayed: np.ndarray = self.reader.epochs < self.reader.epochs.max(initial=0)
        """(N,) bool: samples of earlier epochs."""
        self._left_out: np.ndarray = np.zeros(len(self._replayed), bool)
        """(N,) bool: those of them that are not trained again."""
        self._before: int | None = None
        """First step of replayed samples that is not trained; None: all are."""

    def steps(self, rows: np.ndarray) -> np.ndarray:
        """Return the denoising step of rows (B, 2), or the index of their noise level."""
        return rows[:, 1]

    def prompts_of(self, rows: np.ndarray) -> list[str]:
        """Return the prompt id of rows (B, 2)."""
        return [self.reader.prompt_ids[number] for number in self.reader.prompt_rows[rows[:, 0]]]

    def changed_policy(self) -> None:  # noqa: B027 - most have nothing that depends on it
        """Handle a change of the policy, which now differs from the one that drew the samples."""

    def begin_update(self, units: Units) -> None:  # noqa: B027 - most weigh all rows alike
        """Handle the start of an update with these units, before its first batch is read."""

    def pair_prompts(self, units: Units) -> None:
        """Choose for each row of an update the next row, round the update, that has another prompt."""
        samples = units.rows[:, 0]
        prompts, own = self.beginnings(samples), np.arange(len(samples))
        others, several = own.copy(), len(np.unique(prompts)) > 1
        for shift in range(1, len(samples)):
            alone = prompts[others] == prompts
            if not (several and alone.any()):
                break
            others[alone] = (own[alone] + shift) % len(samples)
        rows = zip(map(tuple, units.rows.tolist()), samples[others].tolist(), strict=True)
        self._others: dict[tuple[int, ...], int] = dict(rows)

    def beginnings(self, samples: np.ndarray) -> np.ndarray:
        """Return a number for the prompt of each sample, (N,)."""
        prompts: np.ndarray = self.reader.prompt_rows[samples]
        return prompts

    def mismatched(self, units: Units, size: int) -> Batch:
        """Return a micro-batch of the update that ``pair_prompts`` was called with, under the prompts of others."""
        batch = self.batch(units, size)
        return self.under_prompts_of(batch, [self._others[key] for key in batch.keys])

    def under_prompts_of(self, batch: Batch, samples: Sequence[int]) -> Batch:
        """Return the rows of a batch with the prompts of other samples, one per row."""
        raise NotImplementedError(f"{type(self).__name__} keeps the prompts of its rows")

    def alike(self, units: Units) -> list[Units]:
        """Return the units of an update in parts of equal shapes, which do not share micro-batches."""
        return [units]

    @abstractmethod
    def positions(self) -> np.ndarray:
        """Return the number of rows of each sample, (N,)."""

    @abstractmethod
    def gather(self, rows: np.ndarray, common: Mapping[str, Any]) -> Batch:
        """Return the batch of rows (B, 2); ``common`` holds the fields of every batch."""

    def units(self, requires: Requirements) -> Units:
        """Return units of rows that must stay together; samples of advantage 0 only if the algorithm uses them."""
        if requires.unit == "row":
            return self._early(single_rows(np.flatnonzero(self.live(requires)), self.positions()))
        chosen = [self._pair(members) if requires.unit == "pair" else members for members in self._groups()]
        joint = joint_rows([members for members in chosen if self._counts(members, requires)], self.positions())
        return self._early(joint)

    def choose(self, section: ReplaySection, requires: Requirements) -> None:
        """Leave out samples of earlier epochs, and their late steps, according to the section."""
        self._before = section.steps
        if section.share == 1:
            return
        for epoch in np.unique(self.reader.epochs[self._replayed]):
            groups = [members for members in self._groups() if self.reader.epochs[members[0]] == epoch]
            parts = [[sample] for members in groups for sample in members] if requires.unit == "row" else groups
            earned = np.array([self.rewards[members].astype(np.float64).mean() for members in parts])
            count = math.ceil(section.share * len(parts))
            # Ties go to the first.
            for number in np.argsort(-earned, kind="stable")[count:]:
                self._left_out[parts[number]] = True

    def _early(self, units: Units) -> Units:
        """Return the units without rows that are late steps of an earlier epoch."""
        if self._before is None or not len(units):
            return units
        late = self._replayed[units.rows[:, 0]] & (self.steps(units.rows) >= self._before)
        return units.take(np.flatnonzero(~np.logical_or.reduceat(late, units.bounds[:-1])))

    def live(self, requires: Requirements) -> np.ndarray:
        """Return the mask of samples that can contribute, (N,) bool; advantage 0 counts if the algorithm uses it."""
        usable = ~np.isnan(self.advantages) & ~self._left_out
        counts = self.advantages > 0 if requires.desired else self.says_something() | requires.zero_advantages
        live: np.ndarray = counts & usable
        return live

    def says_something(self) -> np.ndarray:
        """Return the mask of samples with a nonzero advantage, (N,) bool."""
        mask: np.ndarray = self.advantages != 0
        return mask

    def batch(self, units: Units, size: int) -> Batch:
        """Return a micro-batch of a fixed size; missing rows repeat the last one with weight 0.

        Args:
            units: units with at most ``size`` rows in total.
            size: rows of the batch.
        """
        count, padding = len(units.rows), size - len(units.rows)
        rows = np.concatenate([units.rows, np.repeat(units.rows[-1:], padding, axis=0)])
        # Padding is a separate unit, so sums over units exclude it.
        numbers = np.concatenate([np.repeat(np.arange(len(units)), units.sizes), np.full(padding, len(units))])
        device = self.device
        keys = [(int(sample), int(position)) for sample, position in rows]
        common = {
            "advantages": tensor_of(self.advantages[rows[:, 0]], device),
            "weights": tensor_of(np.arange(size) < count, device),
            "units": index_of(numbers, device),
            "importance": tensor_of([self._importance.get(k, 1.0) * self.factors[k[0]] for k in keys], device),
            "count": count,
            "age": torch.from_numpy(self.ages[rows[:, 0]].astype(np.int64)),
            "step": torch.from_numpy(self.steps(rows).astype(np.int64)),
            "keys": tuple(keys),
        }
        return self.gather(rows, common)

    def _groups(self) -> list[list[int]]:
        """Return the samples of each group of each epoch that are not left out, in order of first appearance."""
        groups: dict[tuple[int, int], list[int]] = {}
        keys = zip(self.reader.epochs.tolist(), self.reader.groups.tolist(), strict=True)
        for sample, key in enumerate(keys):
            if not np.isnan(self.advantages[sample]) and not self._left_out[sample]:
                groups.setdefault(key, []).append(sample)
        return list(groups.values())

    def _counts(self, members: Sequence[int], requires: Requirements) -> bool:
        """Return whether a unit can contribute: a pair must differ in advantage, a group must have some."""
        advantages = self.advantages[members]
        nothing = advantages[0] if requires.unit == "pair" else 0
        return requires.zero_advantages or bool((advantages != nothing).any())

    def _pair(self, members: Sequence[int]) -> list[int]:
        """Return the best and the worst sample; rewards break ties of advantages."""
        ordered = sorted(members, key=lambda sample: (float(self.advantages[sample]), float(self.rewards[sample])))
        return [ordered[-1], ordered[0]]


class Correctable(SampleSet):
    """Samples whose old log-probs can be recomputed with the policy that an epoch starts from."""

    def stale(self, requires: Requirements) -> Units:
        """Return the rows of older policies that are trained, one per unit, in the order of samples and positions."""
        rows = self.units(requires).rows
        own = np.unique(rows[self.ages[rows[:, 0]] > 0], axis=0)
        return Units(own, np.arange(len(own) + 1))

    @abstractmethod
    def recompute(
        self, stale: Units, models: Any, *, size: int, file: IO[bytes] | None, idle: Sequence[Units]
    ) -> Proximal:
        """Return the policy's log-probs and means of rows.

        Args:
            stale: the rows.
            models: the policy, of the kind's ``Models``.
            size: maximum rows per micro-batch.
            file: stores arrays, if the algorithm compares more than log-probs.
            idle: micro-batches to compute and discard, if ranks run in lockstep.
        """

    @abstractmethod
    def correct(self, proximal: Proximal, section: ReplaySection) -> None:
        """Set the result of ``recompute`` as old values of stale rows, and set their importance weights."""


def _in_order(advantages: pa.Table, sample_ids: pa.ChunkedArray) -> pa.Table:
    """Return the values of samples, without the names that the samples have themselves."""
    values = advantages.select([name for name in advantages.column_names if not name.endswith("_id")])
    # As a rule they are in the same order, and an index of names takes more memory than all else.
    if advantages.column("sample_id") == sample_ids:
        return values
    positions = pc.index_in(sample_ids, value_set=advantages.column("sample_id").combine_chunks())
    if positions.null_count:
        missing = pc.filter(sample_ids, pc.is_null(positions))
        raise CorruptError(f"{len(missing)} samples have no advantage, the first is {missing[0]}.")
    return values.take(positions.combine_chunks())


def index_of(values: np.ndarray, device: torch.device) -> Tensor:
    """Return integers as int64 on a device."""
    return moved(torch.from_numpy(np.asarray(values, np.int64)), device)


def tensor_of(values: Sequence[float] | np.ndarray, device: torch.device) -> Tensor:
    """Return numbers as float32 on a device."""
    return moved(torch.from_numpy(np.array(values, np.float32)), device)


def stacked(arrays: Sequence[np.ndarray], device: torch.device) -> Tensor:
    """Return arrays of equal shape (...) as (B, ...) float32 on a device."""
    return moved(torch.from_numpy(np.stack(arrays)), device).float()
