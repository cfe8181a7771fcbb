"""Evaluation results for an export; only this module of the package reads evaluations."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from storage.trajectories.tables import read_shard
from tasks.inputs.components import open_trajectory_store
from tasks.metrics.evaluations import Figures
from tasks.metrics.evaluations import evaluation_figures as figures_of
from tasks.runs.context import RunContext


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One image or clip of an evaluation."""

    prompt: str
    """Its prompt."""
    verdict: str
    """Note and score of the first reward; empty if it has not scored."""
    media: np.ndarray
    """(H, W, 3) or (F, H, W, 3) uint8."""


def evaluation_figures(context: RunContext, epoch: int) -> Figures:
    """Return figures by split and reward; empty if the epoch was not evaluated."""
    return figures_of(context.chain, epoch)


def evaluation_images(context: RunContext, epoch: int, split: str, count: int) -> list[Shown]:
    """Return the first images of a split; empty if the epoch was not evaluated, or samples are not decoded."""
    store, entry = context.store, context.chain.find(epoch, "evaluate")
    record = None if entry is None else store.record(entry.ref, split)
    if entry is None or record is None or not context.config.rollout.media.decodes:
        return []
    shard = open_trajectory_store(context.config.rollout.store).open(store.files(entry.ref, record))
    rows = shard.table.select(["sample_id", "prompt"]).slice(0, count).to_pylist()
    verdicts = _verdicts(context, epoch, split)
    return [
        Shown(prompt=row["prompt"], verdict=verdicts.get(row["sample_id"], ""), media=shard.media(number))
        for number, row in enumerate(rows)
    ]


def _verdicts(context: RunContext, epoch: int, split: str) -> dict[str, str]:
    """Return note and score of the first reward, by sample."""
    store, entry = context.store, context.chain.find(epoch, "judge", context.config.rewards[0].slot)
    record = None if entry is None else store.record(entry.ref, split)
    if entry is None or record is None:
        return {}
    rows = read_shard(store, entry.ref, record).to_pylist()
    given = {row["sample_id"]: "" if row["reward"] is None else f"{row['reward']:.3g}" for row in rows}
    return {row["sample_id"]: f"{row['note']} {given[row['sample_id']]}".strip() for row in rows}
