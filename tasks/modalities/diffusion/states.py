"""Stored states of rollouts as rows from which denoising continues, and metadata of rows for rewards in training.

Legend: N samples, B rows of a micro-batch, K forwards of a row, ... latent dims.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from flowmill.models.maths.conditioning import Conditioning
from flowmill.models.maths.preserving import clean_ends
from flowmill.models.maths.transitions import Grid
from flowmill.storage.trajectories.base import TrajectoryShard
from flowmill.tasks.algorithms.diffusion import DiffusionBatch, StateBatch, Subjects
from flowmill.tasks.inputs.prompts import StoredPrompt
from flowmill.tasks.modalities.reader import SampleReader
from flowmill.tasks.modalities.sample_set import SampleSet, stacked, tensor_of
from flowmill.tasks.runs.seeds import derive

if TYPE_CHECKING:
    import torch

#: Prompt ids -> one row of conditioning each, on the training device.
Condition = Callable[[Sequence[str]], Conditioning]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowMetadata:
    """Metadata of rows for rewards."""

    prompts: Mapping[str, StoredPrompt]
    """Prompts by id."""
    seed: int
    """Seed of run and epoch; a row's draws derive from it, the sample and the position."""

    def of(self, reader: SampleReader, keys: Sequence[tuple[int, int]]) -> Subjects:
        """Return the metadata of rows (sample, position) for rewards."""
        prompts = [self.prompts[reader.prompt_ids[reader.prompt_rows[sample]]] for sample, _ in keys]
        samples = [str(reader.sample_ids[sample].as_py()) for sample, _ in keys]
        positions = [position for _, position in keys]
        return Subjects(
            prompts=tuple(prompt.text for prompt in prompts),
            metadata=tuple(prompt.metadata for prompt in prompts),
            samples=tuple(samples),
            draws=tuple(
                derive(self.seed, "choice", name, place) for name, place in zip(samples, positions, strict=True)
            ),
        )


class StateSet(SampleSet):
    """Stored states with enough steps after them for an algorithm."""

    def __init__(
        self,
        shards: Sequence[TrajectoryShard],
        advantages: pa.Table,
        *,
        calls: int,
        condition: Condition,
        device: torch.device,
        ahead: int = 0,
        metadata: RowMetadata | None = None,
    ) -> None:
        """Bind to the samples.

        Args:
            shards: the shards, opened.
            calls: K: required steps after a state.
            condition: returns the conditioning of a batch.
            device: the device of batches.
            ahead: see ``SampleSet``.
            metadata: metadata of rows for rewards, if the algorithm calls them.
        """
        super().__init__(shards, advantages, ahead=ahead, device=device)
        self._calls, self._condition, self._metadata = calls, condition, metadata

    def positions(self) -> np.ndarray:
        """Return the number of states of each sample with enough steps after them; they are its first states."""
        reader = self.reader
        lengths = [len(reader.sigmas[sample]) - 1 for sample in range(len(reader))]
        followed = [(reader.states[row] + self._calls <= steps).sum() for row, steps in enumerate(lengths)]
        return np.array(followed, np.int64)

    def steps(self, rows: np.ndarray) -> np.ndarray:
        return np.array([self.reader.states[sample][position] for sample, position in rows], np.int64)

    def gather(self, rows: np.ndarray, common: Mapping[str, Any]) -> DiffusionBatch:
        device, keys, steps = self.device, common["keys"], self.steps(rows).tolist()
        samples = [sample for sample, _ in keys]
        grids = [self.reader.sigmas[sample] for sample in samples]
        levels = [grid[step : step + self._calls] for grid, step in zip(grids, steps, strict=True)]
        following = [grid[step + 1] for grid, step in zip(grids, steps, strict=True)]
        return StateBatch(
            latents=stacked([latents_at(self.reader, *place) for place in zip(samples, steps, strict=True)], device),
            conditioning=self._condition([self.reader.prompt_ids[self.reader.prompt_rows[each]] for each in samples]),
            grid=Grid(
                tensor_of([level[0] for level in levels], device),
                tensor_of(following, device),
                tensor_of([grid[1] for grid in grids], device),
            ),
            levels=tensor_of(np.stack(levels), device),
            subjects=None if self._metadata is None else self._metadata.of(self.reader, keys),
            **common,
        )


def latents_at(reader: SampleReader, sample: int, state: int) -> np.ndarray:
    """Return the stored latents (...) of a sample at one of its states."""
    index = int(np.flatnonzero(reader.states[sample] == state)[0])
    latents: np.ndarray = reader.array("latents", sample)[index]
    return latents


def ends_at(reader: SampleReader, samples: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return the (B,) final levels of the chains of samples."""
    return tensor_of([reader.sigmas[sample][-1] for sample in samples], device)


def clean_latents_of(reader: SampleReader, samples: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return the (B, ...) clean latents from which samples were decoded, for any final level of their chains."""
    ends = [latents_at(reader, sample, len(reader.sigmas[sample]) - 1) for sample in samples]
    return clean_ends(stacked(ends, device), ends_at(reader, samples, device))
