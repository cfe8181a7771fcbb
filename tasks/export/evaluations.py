"""Samples of an evaluation for the card of an export."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from flowmill.tasks.metrics.view import RunView


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One image or clip of an evaluation."""

    prompt: str
    """Its prompt."""
    verdict: str
    """Note and score of the first reward; empty if it has not scored."""
    media: np.ndarray
    """(H, W, 3) or (F, H, W, 3) uint8."""


def evaluation_images(view: RunView, epoch: int, split: str, count: int) -> list[Shown]:
    """Return the first images of a split; empty if the epoch was not evaluated, or samples are not decoded."""
    entry = view.chain.find(epoch, "evaluate")
    if entry is None or view.store.manifest(entry.ref) is None or not view.config.rollout.media.decodes:
        return []
    label, rows = view.config.rewards[0].slot, view.samples(epoch, evaluation=True).to_pylist()
    chosen = [row for row in rows if row["list"] == split][:count]
    media = view.pictures(epoch, [row["sample_id"] for row in chosen], evaluation=True)

    def verdict(row: dict[str, Any]) -> str:
        score = row.get(f"reward.{label}")
        return f"{row.get(f'note.{label}') or ''} {'' if score is None else f'{score:.3g}'}".strip()

    return [Shown(prompt=row["prompt"], verdict=verdict(row), media=media[row["sample_id"]]) for row in chosen]
