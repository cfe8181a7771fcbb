"""Rewards of an epoch's samples."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from flowmill.configs.errors import CorruptError
from flowmill.configs.schema import RunConfig
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.layout import ArtifactRef
from flowmill.storage.trajectories.base import TrajectoryShard
from flowmill.storage.trajectories.tables import in_few_chunks
from flowmill.tasks.inputs.renderer import image_name, render_of, turn_in
from flowmill.tasks.metrics.samples import shards_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRewards:
    """The samples of one epoch with their rewards."""

    samples: pa.Table
    """Any of its reward tables, for sample_id, prompt_id and group_id."""
    parts: Sequence[Tensor]
    """Per reward, (N,) float64, before weights; NaN where its score failed."""
    weights: Sequence[float]
    """Of these."""
    penalty: Tensor
    """(N,) float64: kl_coef times the KL to the base model, mean over its trained steps; the penalty of length,
    and the cost of turns."""
    total: Tensor
    """(N,) float64: the weighted sum of rewards less the penalty; NaN where one failed."""
    cut: Tensor
    """(N,) bool: left out, as it was truncated."""
    distances: Tensor | None = None
    """(N,) float64: how unlike the others of its group a sample is, if advantages are weighed by it."""

    def take(self, mask: Tensor) -> SampleRewards:
        """Return some rows (N,) bool."""
        if bool(mask.all()):
            return self
        return replace(
            self,
            samples=self.samples.filter(pa.array(mask.numpy())),
            parts=[part[mask] for part in self.parts],
            penalty=self.penalty[mask],
            total=self.total[mask],
            cut=self.cut[mask],
            distances=None if self.distances is None else self.distances[mask],
        )


def weighted(parts: Sequence[Tensor], weights: Sequence[float], *, like: Tensor) -> Tensor:
    """Return the weighted sum of (N,) scores, float64; zeros like another tensor where there are none."""
    products = [weight * part for weight, part in zip(weights, parts, strict=True)]
    return torch.stack(products).sum(0) if products else torch.zeros_like(like)


def history_of(names: Sequence[str], earlier: Sequence[SampleRewards]) -> list[Tensor]:
    """Return each group's rewards of earlier epochs, oldest first, less the penalties of those epochs."""
    totals: dict[str, list[float]] = {name: [] for name in names}
    for epoch in reversed(earlier):
        for name, total in zip(epoch.samples.column("group_id").to_pylist(), epoch.total.tolist(), strict=True):
            if name in totals and not math.isnan(total):
                totals[name].append(total)
    return [torch.tensor(totals[name], dtype=torch.float64) for name in names]


def figures_of_samples(
    store: ArtifactStore, ref: ArtifactRef, names: pa.ChunkedArray, column: str, of: Callable[[Any], float]
) -> Tensor:
    """Return a figure of a column of stored samples, (N,) float64; see ``by_sample``.

    Args:
        column: a column of their table.
        of: value of the column -> figure.
    """
    return by_sample(store, ref, names, lambda shard: map(of, shard.table.column(column).to_pylist()))


def by_sample(
    store: ArtifactStore,
    ref: ArtifactRef,
    names: pa.ChunkedArray,
    of: Callable[[TrajectoryShard], Iterable[float]],
) -> Tensor:
    """Return a figure of stored samples, (N,) float64.

    Args:
        ref: an artifact of samples.
        names: ids of the samples.
        of: shard -> the figure of each row.
    """

    def figures(shard: TrajectoryShard) -> pa.Table:
        values = pa.array(map(float, of(shard)), pa.float64())
        return pa.table({"sample_id": shard.table.column("sample_id"), "value": values})

    every = in_few_chunks(map(figures, shards_of(store, ref)))
    rows = pc.index_in(names, value_set=every.column("sample_id").combine_chunks())
    if rows.null_count:
        raise CorruptError(f"{ref} has no sample '{names.filter(pc.is_null(rows))[0]}', which is scored.")
    return torch.tensor(every.column("value").take(rows).to_numpy(), dtype=torch.float64)


def drawings_of(store: ArtifactStore, ref: ArtifactRef, config: RunConfig, samples: pa.ChunkedArray) -> Tensor:
    """Return the turn that drew the newest image of each sample, (N,) float64."""
    names = [image_name(each, 0, of=render_of(config).images) for each in samples.to_pylist()]
    column = pa.chunked_array([pa.array(names, pa.string())])
    return figures_of_samples(store, ref, column, "metadata", lambda metadata: turn_in(json.loads(metadata)))
