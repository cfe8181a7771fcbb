"""Sample sets of diffusion policies: stored stochastic steps, or final samples with fresh noise.

Legend: N samples, B rows of a micro-batch, ... latent dims.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import IO, Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from flowmill.configs.advantages import ReplaySection
from flowmill.models.devices import moved
from flowmill.models.maths.preserving import flow_length
from flowmill.models.maths.transitions import Grid, Kernel, expand, grid_of, rectifiers, step_stds
from flowmill.storage.trajectories.base import TrajectoryShard
from flowmill.tasks.algorithms.base import Batch, ForwardTimes, Requirements, expect
from flowmill.tasks.algorithms.diffusion import DiffusionBatch, DiffusionModels, ForwardBatch, TransitionBatch
from flowmill.tasks.modalities.diffusion.replay import recompute
from flowmill.tasks.modalities.diffusion.states import Condition, RowMetadata, clean_latents_of, ends_at, latents_at
from flowmill.tasks.modalities.gradients import RewardGradients
from flowmill.tasks.modalities.proximal import Proximal, RowFile, importance_weights
from flowmill.tasks.modalities.rows import Units, padded
from flowmill.tasks.modalities.sample_set import Correctable, SampleSet, stacked, tensor_of
from flowmill.tasks.runs.seeds import derive, generator, permutation

#: Default requirements: only samples with a nonzero advantage are trained.
_PLAIN = Requirements()


class TransitionSet(Correctable):
    """Stored stochastic steps."""

    def __init__(
        self,
        shards: Sequence[TrajectoryShard],
        advantages: pa.Table,
        *,
        kernel: Kernel,
        means: bool,
        condition: Condition,
        device: torch.device,
        unconditional: bool = False,
        ahead: int = 0,
        requires: Requirements = _PLAIN,
    ) -> None:
        """Bind to the samples.

        Args:
            shards: the shards, opened.
            kernel: the sampler's step, for the noise stds of the schedule.
            means: read stored means.
            condition: returns the conditioning of a batch on demand; that of an epoch may exceed a device's memory.
            device: the device of batches.
            unconditional: the trained policy drew all samples, so its stored predictions without the prompt are used
                until it changes.
            ahead: see ``SampleSet``.
            requires: the algorithm's requirements, which select the trained samples.
        """
        super().__init__(shards, advantages, ahead=ahead, device=device)
        self._condition = condition
        self._means = means
        self._finals = requires.finals
        self.sources: Mapping[str, str] | None = None
        """Source name by prompt id, if sources have separate teachers."""
        self._unconditional = unconditional
        self._unchanged = True
        self._proximal: Proximal | None = None
        self._kernel = kernel
        self._measure(requires)

    def choose(self, section: ReplaySection, requires: Requirements) -> None:
        """Leave out samples and steps of earlier epochs, and update the means over the remaining rows."""
        super().choose(section, requires)
        self._measure(requires)

    def positions(self) -> np.ndarray:
        return self.reader.steps.sizes

    def steps(self, rows: np.ndarray) -> np.ndarray:
        return np.array([self.reader.steps[sample][position] for sample, position in rows], np.int64)

    def changed_policy(self) -> None:
        """Stop using stored predictions, and use stored old log-probs from now on."""
        self._unchanged = False

    def correct(self, proximal: Proximal, section: ReplaySection) -> None:
        """Set recomputed log-probs and means as the old ones of stale rows, and set their importance weights."""
        gaps = {key: value - float(self.reader.log_probs[key[0]][key[1]]) for key, value in proximal.log_probs.items()}
        self._importance = importance_weights(gaps, section)
        self._proximal = proximal

    def recompute(
        self, stale: Units, models: DiffusionModels, *, size: int, file: IO[bytes] | None, idle: Sequence[Units]
    ) -> Proximal:
        """Return log-probs of rows, and the means of their steps if there is a file for them."""
        means = None if file is None else RowFile(file)
        return recompute(stale, self._padded(size), models, micro_batch_size=size, means=means, idle=idle)

    def _padded(self, size: int) -> Callable[[Units], DiffusionBatch]:
        return lambda units: expect(self.batch(units, padded(len(units.rows), size)), DiffusionBatch)

    def gather(self, rows: np.ndarray, common: Mapping[str, Any]) -> DiffusionBatch:
        device = self.device
        samples, steps = rows[:, 0].tolist(), self.steps(rows).tolist()
        places = list(zip(samples, steps, strict=True))
        sigmas = [self.reader.sigmas[sample] for sample in samples]
        means = [self._old_mean(*key) for key in common["keys"]] if self._means else None
        if self._unconditional and self._unchanged:
            predictions = [self.reader.array("unconditional", sample)[position] for sample, position in common["keys"]]
            common = {**common, "unconditional": stacked(predictions, device)}
        return TransitionBatch(
            latents=stacked([latents_at(self.reader, sample, step) for sample, step in places], device),
            next_latents=stacked([latents_at(self.reader, sample, step + 1) for sample, step in places], device),
            conditioning=self._condition(self.prompts_of(rows)),
            grid=Grid(
                tensor_of([grid[step] for grid, step in zip(sigmas, steps, strict=True)], device),
                tensor_of([grid[step + 1] for grid, step in zip(sigmas, steps, strict=True)], device),
                tensor_of([grid[1] for grid in sigmas], device),
            ),
            old_log_probs=tensor_of([self._old_log_prob(*key) for key in common["keys"]], device),
            mean_std=torch.full((len(rows),), self._mean_std, device=device),
            mean_rectifier=torch.full((len(rows),), self._mean_rectifier, device=device),
            old_means=None if means is None else stacked(means, device),
            finals=clean_latents_of(self.reader, samples, device) if self._finals else None,
            sources=None if self.sources is None else tuple(self.sources[each] for each in self.prompts_of(rows)),
            own=moved(torch.tensor([self._is_own(*key) for key in common["keys"]]), device),
            **common,
        )

    def _is_own(self, sample: int, position: int) -> bool:
        """Return whether a row's old log-prob is that of the current policy."""
        return self._unchanged and (self._proximal is not None or self.ages[sample] == 0)

    def _old_log_prob(self, sample: int, position: int) -> float:
        # A row that a rank reads without having recomputed it would be compared with another policy than elsewhere.
        if self._proximal is not None and self.ages[sample] > 0:
            return float(self._proximal.log_probs[sample, position])
        return float(self.reader.log_probs[sample][position])

    def _old_mean(self, sample: int, position: int) -> np.ndarray:
        if self._proximal is not None and self._proximal.means is not None and self.ages[sample] > 0:
            return self._proximal.means[sample, position]
        stored: np.ndarray = self.reader.array("means", sample)[position]
        return stored

    def _measure(self, requires: Requirements) -> None:
        sigmas = torch.tensor(self.reader.sigmas[0])
        self._mean_std = self._mean_over_rows(step_stds(self._kernel, sigmas), requires)
        self._mean_rectifier = self._mean_over_rows(rectifiers(self._kernel, grid_of(sigmas)), requires)

    def _mean_over_rows(self, of_steps: Tensor, requires: Requirements) -> float:
        """Return the mean of (T,) values by step over trained rows: each step is weighted by its number of rows."""
        steps, rows = self.reader.steps.values, np.repeat(self.live(requires), self.positions())
        if self._before is not None:
            rows &= ~np.repeat(self._replayed, self.positions()) | (steps < self._before)
        trained = steps[rows]
        if not len(trained):
            return 1.0
        return float(of_steps[trained.tolist()].double().mean())


class ForwardSet(SampleSet):
    """Final latents, noised to levels drawn from the run's seed."""

    def __init__(
        self,
        shards: Sequence[TrajectoryShard],
        advantages: pa.Table,
        *,
        times: ForwardTimes,
        seed: int,
        condition: Condition,
        device: torch.device,
        ahead: int = 0,
        gradients: RewardGradients | None = None,
        metadata: RowMetadata | None = None,
    ) -> None:
        """Bind to the samples; levels and noise are drawn from ``seed``, which identifies run and epoch."""
        super().__init__(shards, advantages, ahead=ahead, device=device)
        self.of_one_size = True
        """Whether all samples have latents of one size."""
        self.trained_levels: Tensor | None = None
        """(N,) levels that the model was trained with, if levels are drawn from those."""
        self._gradients, self._metadata = gradients, metadata
        self._condition = condition
        self._times = times
        self._seed = seed

    def live(self, requires: Requirements) -> np.ndarray:
        """Return the mask of samples that can contribute; if gradients are needed, samples without one cannot."""
        live = super().live(requires)
        if self._gradients is None:
            return live
        for sample in np.flatnonzero(live).tolist():
            live[sample] = self._gradients.has(self._id(sample))
        return live

    def alike(self, units: Units) -> list[Units]:
        """Return the units in parts with latents of one size, in the order of first appearance."""
        if self.of_one_size or not len(units):
            return [units]
        parts: dict[tuple[int, ...], list[int]] = {}
        for number, sample in enumerate(units.rows[units.bounds[:-1], 0].tolist()):
            parts.setdefault(self.reader.shape("latents", sample), []).append(number)
        return [units.take(np.array(numbers)) for numbers in parts.values()]

    def positions(self) -> np.ndarray:
        return np.full(len(self.reader), self._times.count)

    def gather(self, rows: np.ndarray, common: Mapping[str, Any]) -> DiffusionBatch:
        device = self.device
        keys = common["keys"]
        samples = [sample for sample, _ in keys]
        clean = clean_latents_of(self.reader, samples, device)
        noise = torch.stack([self._noise(sample, i, tuple(clean.shape[1:])) for sample, i in keys])
        noise = moved(noise, device)
        sigma = tensor_of([self._level(*key) for key in keys], device)
        level = sigma.reshape(-1, *([1] * (clean.ndim - 1)))
        return ForwardBatch(
            latents=(1 - level) * clean + level * noise,
            conditioning=self._condition(self.prompts_of(rows)),
            grid=Grid(sigma, torch.zeros_like(sigma), sigma),
            clean=clean,
            noise=noise,
            gradients=self._followed(samples),
            subjects=None if self._metadata is None else self._metadata.of(self.reader, keys),
            **common,
        )

    def under_prompts_of(self, batch: Batch, samples: Sequence[int]) -> ForwardBatch:
        """Return noised samples with the conditioning of other samples' prompts."""
        rows = expect(batch, ForwardBatch)
        return replace(rows, conditioning=self._condition(self.prompts_of(np.array(samples)[:, None])))

    def _followed(self, samples: Sequence[int]) -> Tensor | None:
        if self._gradients is None:
            return None
        # Stored gradients are with respect to final latents, which are smaller by this factor.
        stored = stacked([self._gradients.of(self._id(sample)) for sample in samples], self.device)
        return stored * expand(flow_length(ends_at(self.reader, samples, self.device)), stored)

    def _id(self, sample: int) -> str:
        return str(self.reader.sample_ids[sample].as_py())

    def _name(self, sample: int) -> str:
        reader = self.reader
        return str(reader.group_ids[reader.groups[sample]].as_py()) if self._times.shared else self._id(sample)

    def _noise(self, sample: int, position: int, shape: tuple[int, ...]) -> Tensor:
        position = 0 if self._times.constant_noise else position
        return torch.randn(
            shape, generator=generator(derive(self._seed, "forward noise", self._name(sample), position))
        )

    def _level(self, sample: int, position: int) -> float:
        times, name = self._times, self._name(sample)
        draw = np.random.Generator(np.random.PCG64(derive(self._seed, "forward level", name, position)))
        if times.bounded:
            return times.level(position, float(draw.random()))
        if times.kind == "logit_normal":
            # The shift multiplies the odds of a level.
            return float(1 / (1 + np.exp(-draw.standard_normal()) / times.shift))
        if times.kind == "timesteps":
            levels = self.trained_levels
            assert levels is not None, "rows were asked for without the levels of the model"
            first, beyond = (len(levels) * each // times.count for each in (position, position + 1))
            return float(levels[int(draw.integers(first, max(beyond, first + 1)))])
        grid = self.reader.sigmas[sample][:-1]
        order = permutation(len(grid), self._seed, "forward level", name)
        return float(grid[order[position % len(grid)]])
