"""What an export tells of evaluations: the only place of this room that reads them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from storage.tables import read_shard
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
    """What the first reward read and gave; empty when it has not scored."""
    media: np.ndarray
    """(H, W, 3) or (F, H, W, 3) uint8."""


def evaluation_figures(context: RunContext, epoch: int) -> Figures:
    """Return figures by split and reward; nothing when the epoch was not evaluated."""
    return figures_of(context.chain, epoch)


def evaluation_images(context: RunContext, epoch: int, split: str, count: int) -> list[Shown]:
    """Return the first images of a split; none when the epoch was not evaluated, or nothing is decoded."""
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
    """Return what the first reward read and gave, by sample."""
    store, entry = context.store, context.chain.find(epoch, "judge", context.config.rewards[0].slot)
    record = None if entry is None else store.record(entry.ref, split)
    if entry is None or record is None:
        return {}
    rows = read_shard(store, entry.ref, record).to_pylist()
    given = {row["sample_id"]: "" if row["reward"] is None else f"{row['reward']:.3g}" for row in rows}
    return {row["sample_id"]: f"{row['note']} {given[row['sample_id']]}".strip() for row in rows}
