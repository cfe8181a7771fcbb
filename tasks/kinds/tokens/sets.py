"""Stored texts as rows to train on: one row is one sample, with a mask of the tokens the policy chose.

Legend: N samples, B rows of a micro-batch, W positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch

from storage.trajectories.base import TrajectoryShard
from tasks.algorithms.tokens import TokenBatch
from tasks.hosting.devices import moved
from tasks.kinds.rows import Units
from tasks.kinds.sample_set import SampleSet
from tasks.kinds.tokens.making import padded_rows

if TYPE_CHECKING:
    from torch import Tensor


class TextSet(SampleSet):
    """Texts of one epoch with their advantages."""

    def __init__(
        self, shards: Sequence[TrajectoryShard], advantages: pa.Table, *, device: torch.device | None = None
    ) -> None:
        """Bind to the samples; see ``SampleSet``."""
        super().__init__(shards, advantages, device=device)
        self._unchanged, self._share = True, 1.0

    def positions(self) -> np.ndarray:
        """Return 1 for every sample."""
        return np.ones(len(self.reader), np.int64)

    def changed_policy(self) -> None:
        """Take old log-probs for what they are."""
        self._unchanged = False

    def begin_update(self, units: Units) -> None:
        """Count the tokens of a whole update, by which its rows are weighed whatever batches they come in."""
        counts = self.reader.log_probs.sizes[units.rows[:, 0]]
        self._share = len(units.rows) / max(1, int(counts.sum()))

    def gather(self, rows: np.ndarray, common: Mapping[str, Any]) -> TokenBatch:
        """Return the texts of rows."""
        samples, device = rows[:, 0].tolist(), self.device
        ids, lengths = padded_rows([self.reader.array("tokens", sample) for sample in samples], device)
        masks = [self.reader.array("token_mask", sample).astype(bool) for sample in samples]
        shape = (len(samples), ids.shape[1])
        old = [self.reader.log_probs[sample] for sample in samples]
        sampled = [self.reader.array("sampled_log_probs", sample) for sample in samples]
        return TokenBatch(
            ids=ids,
            lengths=lengths,
            mask=moved(torch.from_numpy(_spread(shape, masks, masks, bool)), device),
            old_log_probs=self._numbers(shape, masks, old),
            sampled_log_probs=self._numbers(shape, masks, sampled),
            share=torch.full((len(samples),), self._share, device=device),
            own=moved(torch.from_numpy(self._unchanged & (self.ages[samples] == 0)), device),
            **common,
        )

    def _numbers(self, shape: tuple[int, int], masks: Sequence[np.ndarray], values: Sequence[np.ndarray]) -> Tensor:
        return moved(torch.from_numpy(_spread(shape, masks, values, np.float32, chosen=True)), self.device)


def _spread(
    shape: tuple[int, int],
    masks: Sequence[np.ndarray],
    values: Sequence[np.ndarray],
    kind: Any,
    *,
    chosen: bool = False,
) -> np.ndarray:
    """Return values in their places, (B, W): one per token, or with ``chosen`` one per token of the mask."""
    full = np.zeros(shape, kind)
    for number, (mask, row) in enumerate(zip(masks, values, strict=True)):
        places = np.flatnonzero(mask) if chosen else np.arange(len(row))
        full[number, places] = row
    return full
