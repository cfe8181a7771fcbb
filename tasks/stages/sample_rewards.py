"""Rewards of an epoch's samples."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from flowmill.configs.schema import RunConfig
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.layout import ArtifactRef
from flowmill.tasks.inputs.components import open_trajectory_store
from flowmill.tasks.inputs.renderer import image_name, render_of, turn_in


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
    """(N,) bool: left out, as it ended where it had to."""
    distances: Tensor | None = None
    """(N,) float64: how unlike the others of its group a sample is, if advantages are weighed by it."""

    def take(self, mask: Tensor) -> SampleRewards:
        """Return some rows (N,) bool."""
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
    store: ArtifactStore, ref: ArtifactRef, form: str, names: Sequence[str], column: str, of: Callable[[Any], float]
) -> Tensor:
    """Return a figure of a column of stored samples, (N,) float64.

    Args:
        ref: an artifact of samples.
        form: of the trajectory store.
        names: ids of the samples.
        column: a column of their table.
        of: value of the column -> figure.
    """
    opener, figures = open_trajectory_store(form), dict[str, float]()
    for record in store.shards(ref):
        table = opener.open(store.files(ref, record)).table
        columns = (table.column(each).to_pylist() for each in ("sample_id", column))
        figures |= {sample: of(value) for sample, value in zip(*columns, strict=True)}
    return torch.tensor([figures[name] for name in names], dtype=torch.float64)


def drawings_of(store: ArtifactStore, ref: ArtifactRef, config: RunConfig, samples: Sequence[str]) -> Tensor:
    """Return the turn that drew the newest image of each sample, (N,) float64."""
    names = [image_name(each, 0, of=render_of(config).images) for each in samples]
    return figures_of_samples(
        store, ref, config.rollout.store, names, "metadata", lambda metadata: turn_in(json.loads(metadata))
    )
