"""Micro-batches: rows joined with advantages, read from the shards, and put on the training device.

Legend: N samples, B rows of a micro-batch, ... latent dims.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from configs.errors import CorruptError
from configs.learning import ReplaySection
from models.policies.base import Conditioning
from models.transitions import Grid, Kernel, step_stds
from storage.trajectories.base import TrajectoryShard
from tasks.algorithms.base import Batch, ForwardBatch, ForwardTimes, Requirements, TransitionBatch
from tasks.execution.devices import moved
from tasks.optimize.reader import SampleReader
from tasks.optimize.replay import Proximal, importance_weights
from tasks.optimize.rows import Units, joint_rows, single_rows
from tasks.seeds import derive, generator, permutation

if TYPE_CHECKING:
    from torch import Tensor


class SampleSet(ABC):
    """The samples of one or more epochs with their advantages; latents stay in their files until asked for."""

    def __init__(self, shards: Sequence[TrajectoryShard], advantages: pa.Table, *, ahead: int = 0) -> None:
        """Join samples and advantages by sample id.

        Args:
            shards: the shards, opened.
            advantages: their advantages.
            ahead: every epoch was rolled out with a policy so many epochs older than the one before it.

        Raises:
            CorruptError: a sample has no advantage.
        """
        self.reader = SampleReader(shards)
        found = pc.index_in(self.reader.sample_ids, value_set=advantages.column("sample_id").combine_chunks())
        if found.null_count:
            missing = pc.filter(self.reader.sample_ids, pc.is_null(found))
            raise CorruptError(f"{len(missing)} samples have no advantage, the first is {missing[0]}.")
        self.advantages: np.ndarray = advantages.column("advantage").to_numpy()[found.to_numpy()]
        """(N,) float32; NaN for samples that are left out."""
        self.rewards: np.ndarray = advantages.column("reward").to_numpy()[found.to_numpy()]
        # Policies are numbered by the epoch they come out of; epoch n starts from number n - 1.
        start = int(self.reader.epochs.max(initial=1)) - 1
        self.ages: np.ndarray = start - np.maximum(self.reader.epochs - 1 - ahead, 0)
        """(N,) how much older than the policy this epoch starts from the one is that made each sample, in epochs."""
        self._importance: dict[tuple[int, int], float] = {}

    def steps(self, rows: np.ndarray) -> np.ndarray:
        """Return the denoising step of rows (B, 2), or the number of their noise level."""
        return rows[:, 1]

    def changed_policy(self) -> None:  # noqa: B027 - most have nothing that depends on it
        """Hear that the policy is another than the one that made the samples."""

    @abstractmethod
    def positions(self) -> np.ndarray:
        """Return how many rows each sample has, (N,)."""

    @abstractmethod
    def gather(self, rows: np.ndarray, device: torch.device, common: Mapping[str, Any]) -> Batch:
        """Return the batch of rows (B, 2); ``common`` are the fields every batch has but latents and grid."""

    def units(self, requires: Requirements) -> Units:
        """Return what must stay together; samples of advantage 0 only if the algorithm wants them."""
        if requires.unit == "row":
            return single_rows(np.flatnonzero(self.live(requires)), self.positions())
        chosen = [self._pair(members) if requires.unit == "pair" else members for members in self._groups()]
        return joint_rows([members for members in chosen if self._counts(members, requires)], self.positions())

    def live(self, requires: Requirements) -> np.ndarray:
        """Return which samples can contribute, (N,) bool: those of advantage 0 only if the algorithm wants them."""
        live: np.ndarray = ((self.advantages != 0) | requires.zero_advantages) & ~np.isnan(self.advantages)
        return live

    def batch(self, units: Units, size: int, condition: Callable[[Sequence[str]], Conditioning]) -> Batch:
        """Return a micro-batch of a fixed size; missing rows repeat the last one with weight 0.

        Args:
            units: units with at most ``size`` rows together.
            size: rows of the batch.
            condition: prompt ids -> as many rows of conditioning, on the training device.
        """
        count, padding = len(units.rows), size - len(units.rows)
        rows = np.concatenate([units.rows, np.repeat(units.rows[-1:], padding, axis=0)])
        # Padding is a unit of its own, so that sums over units do not see it.
        numbers = np.concatenate([np.repeat(np.arange(len(units)), units.sizes), np.full(padding, len(units))])
        conditioning = condition([self.reader.prompt_ids[number] for number in self.reader.prompt_rows[rows[:, 0]]])
        device = next(iter(conditioning.positive.values())).device
        keys = [(int(sample), int(position)) for sample, position in rows]
        common = {
            "advantages": _tensor(self.advantages[rows[:, 0]], device),
            "conditioning": conditioning,
            "weights": _tensor(np.arange(size) < count, device),
            "units": _index(numbers, device),
            "importance": _tensor([self._importance.get(key, 1.0) for key in keys], device),
            "count": count,
            "age": torch.from_numpy(self.ages[rows[:, 0]].astype(np.int64)),
            "step": torch.from_numpy(self.steps(rows).astype(np.int64)),
            "keys": tuple(keys),
        }
        return self.gather(rows, device, common)

    def _groups(self) -> list[list[int]]:
        """Return the samples of each group of each epoch that are not left out, in order of first appearance."""
        groups: dict[tuple[int, int], list[int]] = {}
        keys = zip(self.reader.epochs.tolist(), self.reader.groups.tolist(), strict=True)
        for sample, key in enumerate(keys):
            if not np.isnan(self.advantages[sample]):
                groups.setdefault(key, []).append(sample)
        return list(groups.values())

    def _counts(self, members: Sequence[int], requires: Requirements) -> bool:
        """Return whether a unit can contribute: a pair must differ in advantage, a group must have some."""
        advantages = self.advantages[members]
        nothing = advantages[0] if requires.unit == "pair" else 0
        return requires.zero_advantages or bool((advantages != nothing).any())

    def _pair(self, members: Sequence[int]) -> list[int]:
        """Return the best and the worst; rewards decide among advantages that clipping or a mode made equal."""
        ordered = sorted(members, key=lambda sample: (float(self.advantages[sample]), float(self.rewards[sample])))
        return [ordered[-1], ordered[0]]

    def _latents(self, sample: int, state: int) -> np.ndarray:
        index = int(np.flatnonzero(self.reader.states[sample] == state)[0])
        latents: np.ndarray = self.reader.array("latents", sample)[index]
        return latents


class TransitionSet(SampleSet):
    """Stored stochastic steps."""

    def __init__(
        self,
        shards: Sequence[TrajectoryShard],
        advantages: pa.Table,
        *,
        kernel: Kernel,
        means: bool,
        unconditional: bool = False,
        ahead: int = 0,
    ) -> None:
        """Bind to the samples.

        Args:
            shards: the shards, opened.
            advantages: their advantages.
            kernel: gives the noise stds of the schedule.
            means: read stored means.
            unconditional: the policy that made all samples is trained: until it changes, read what it predicted
                without the prompt.
            ahead: see ``SampleSet``.
        """
        super().__init__(shards, advantages, ahead=ahead)
        self._means = means
        self._unconditional = unconditional
        self._unchanged = True
        self._proximal: Proximal | None = None
        self._mean_std = self._mean_over_rows(kernel)

    def positions(self) -> np.ndarray:
        """Return the number of trained steps of each sample."""
        return self.reader.steps.sizes

    def steps(self, rows: np.ndarray) -> np.ndarray:
        """Return the denoising steps of rows."""
        return np.array([self.reader.steps[sample][position] for sample, position in rows], np.int64)

    def stale(self, requires: Requirements) -> Units:
        """Return the rows made by an older policy that can contribute."""
        return single_rows(np.flatnonzero((self.ages > 0) & self.live(requires)), self.positions())

    def changed_policy(self) -> None:
        """Read no predictions any more, and take old log-probs for what they are."""
        self._unchanged = False

    def correct(self, proximal: Proximal, section: ReplaySection) -> None:
        """Make recomputed log-probs and means the old ones of stale rows, and weight those against their behavior."""
        gaps = {key: value - float(self.reader.log_probs[key[0]][key[1]]) for key, value in proximal.log_probs.items()}
        self._importance = importance_weights(gaps, proximal.dims, section)
        self._proximal = proximal

    def gather(self, rows: np.ndarray, device: torch.device, common: Mapping[str, Any]) -> Batch:
        """Return the transitions of rows."""
        samples, steps = rows[:, 0].tolist(), self.steps(rows).tolist()
        places = list(zip(samples, steps, strict=True))
        sigmas = [self.reader.sigmas[sample] for sample in samples]
        means = [self._old_mean(*key) for key in common["keys"]] if self._means else None
        if self._unconditional and self._unchanged:
            known = [self.reader.array("unconditional", sample)[position] for sample, position in common["keys"]]
            common = {**common, "unconditional": _stack(known, device)}
        return TransitionBatch(
            latents=_stack([self._latents(sample, step) for sample, step in places], device),
            next_latents=_stack([self._latents(sample, step + 1) for sample, step in places], device),
            grid=Grid(
                _tensor([grid[step] for grid, step in zip(sigmas, steps, strict=True)], device),
                _tensor([grid[step + 1] for grid, step in zip(sigmas, steps, strict=True)], device),
                _tensor([grid[1] for grid in sigmas], device),
            ),
            old_log_probs=_tensor([self._old_log_prob(*key) for key in common["keys"]], device),
            mean_std=torch.full((len(rows),), self._mean_std, device=device),
            old_means=None if means is None else _stack(means, device),
            own=moved(torch.tensor([self._is_own(*key) for key in common["keys"]]), device),
            **common,
        )

    def _is_own(self, sample: int, position: int) -> bool:
        """Return whether a row's old log-prob is one of the policy as it is now."""
        corrected = self._proximal is not None and (sample, position) in self._proximal.log_probs
        return self._unchanged and (corrected or self.ages[sample] == 0)

    def _old_log_prob(self, sample: int, position: int) -> float:
        known = {} if self._proximal is None else self._proximal.log_probs
        return float(known.get((sample, position), self.reader.log_probs[sample][position]))

    def _old_mean(self, sample: int, position: int) -> np.ndarray:
        known = None if self._proximal is None else self._proximal.means
        if known is not None and (sample, position) in known:
            return known[sample, position]
        stored: np.ndarray = self.reader.array("means", sample)[position]
        return stored

    def _mean_over_rows(self, kernel: Kernel) -> float:
        """Return the noise std of the rows that are trained: each step counts as often as there are rows of it."""
        rows = np.repeat(self.advantages != 0, self.positions())
        trained = self.reader.steps.values[rows]
        if not len(trained):
            return 1.0
        return float(step_stds(kernel, torch.tensor(self.reader.sigmas[0]))[trained.tolist()].double().mean())


class ForwardSet(SampleSet):
    """Final latents, noised anew to levels drawn from the run's seed."""

    def __init__(
        self, shards: Sequence[TrajectoryShard], advantages: pa.Table, *, times: ForwardTimes, seed: int, ahead: int = 0
    ) -> None:
        """Bind to the samples; levels and noise are drawn from ``seed``, which names run and epoch."""
        super().__init__(shards, advantages, ahead=ahead)
        self._times = times
        self._seed = seed

    def positions(self) -> np.ndarray:
        """Return the number of noise levels of each sample."""
        return np.full(len(self.reader), self._times.count)

    def gather(self, rows: np.ndarray, device: torch.device, common: Mapping[str, Any]) -> Batch:
        """Return the noised samples of rows."""
        keys = common["keys"]
        clean = _stack([self._latents(s, len(self.reader.sigmas[s]) - 1) for s, _ in keys], device)
        noise = torch.stack([self._noise(sample, i, tuple(clean.shape[1:])) for sample, i in keys])
        noise = moved(noise, device)
        sigma = _tensor([self._level(*key) for key in keys], device)
        level = sigma.reshape(-1, *([1] * (clean.ndim - 1)))
        return ForwardBatch(
            latents=(1 - level) * clean + level * noise,
            grid=Grid(sigma, torch.zeros_like(sigma), sigma),
            clean=clean,
            noise=noise,
            **common,
        )

    def _name(self, sample: int) -> str:
        ids = self.reader.group_ids if self._times.shared else self.reader.sample_ids
        return str(ids[sample].as_py())

    def _noise(self, sample: int, position: int, shape: tuple[int, ...]) -> Tensor:
        position = 0 if self._times.constant_noise else position
        return torch.randn(
            shape, generator=generator(derive(self._seed, "forward noise", self._name(sample), position))
        )

    def _level(self, sample: int, position: int) -> float:
        times, count, name = self._times, self._times.count, self._name(sample)
        draw = np.random.Generator(np.random.PCG64(derive(self._seed, "forward level", name, position)))
        if times.kind == "stratified":
            return float(times.low + (times.high - times.low) * (position + draw.random()) / count)
        if times.kind == "logit_normal":
            return float(1 / (1 + np.exp(-draw.standard_normal())))
        grid = self.reader.sigmas[sample][:-1]
        order = permutation(len(grid), self._seed, "forward level", name)
        return float(grid[order[position % len(grid)]])


def _index(values: np.ndarray, device: torch.device) -> Tensor:
    return moved(torch.from_numpy(np.asarray(values, np.int64)), device)


def _tensor(values: Sequence[float] | np.ndarray, device: torch.device) -> Tensor:
    return moved(torch.from_numpy(np.array(values, np.float32)), device)


def _stack(arrays: Sequence[np.ndarray], device: torch.device) -> Tensor:
    return moved(torch.from_numpy(np.stack(arrays)), device).float()
