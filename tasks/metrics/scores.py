"""Figures of the scores of one shard or several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flowmill.models.rewards.base import Batch, Scores
from flowmill.tasks.inputs.prompts import SOURCE


def mean_figures(parts: Sequence[tuple[int, Mapping[str, Any]]]) -> dict[str, float]:
    """Return the mean score of (rows, summary) parts, and the share of perfect scores if the reward defines them.

    With several prompt sources each has the same figures, as 'SOURCE_mean'. 'failed' counts the samples that could not
    be scored, if there are any. Without any score there is no mean. 'coverage' is the share of the samples that the
    reward is for, if it is not for all.
    """
    counted = [(int(summary.get("scored", count)), summary) for count, summary in parts]
    figures = _means(counted)
    for name in sorted({name for _, summary in counted for name in summary.get("sources", ())}):
        of_source = [summary["sources"][name] for _, summary in counted if name in summary.get("sources", ())]
        means = _means([(each["scored"], each) for each in of_source])
        figures |= {f"{name}_{figure}": value for figure, value in means.items()}
    failed = sum(int(summary.get("failed", 0)) for _, summary in parts)
    covered, rows = failed + sum(count for count, _ in counted), sum(count for count, _ in parts)
    figures |= {"coverage": covered / rows} if 0 < covered < rows else {}
    return {**figures, "failed": failed} if failed else figures


def _means(parts: Sequence[tuple[int, Mapping[str, Any]]]) -> dict[str, float]:
    rows = sum(count for count, _ in parts)
    if rows == 0:
        return {}
    figures = {"mean": sum(summary["mean"] * count for count, summary in parts if count) / rows}
    if all("exact" in summary for _, summary in parts):
        figures["exact"] = sum(summary["exact"] for _, summary in parts) / rows
    return figures


def score_summary(batch: Batch, scores: Scores, perfect: float | None) -> dict[str, Any]:
    """Return the figures of a shard: over all samples, and by prompt source if there are several."""
    summary = figures_of(scores.values, perfect)
    if summary["scored"] == len(batch):
        del summary["scored"]
    failed = np.isnan(scores.values) & np.array([bool(note) for note in scores.notes or [""] * len(batch)])
    if failed.any():
        summary["failed"] = int(failed.sum())
    of = np.array([metadata.get(SOURCE, "") for metadata in batch.metadata])
    if any(of):
        by_source = {name: figures_of(scores.values[of == name], perfect) for name in sorted(set(of.tolist()))}
        summary["sources"] = {name: counts for name, counts in by_source.items() if counts["scored"]}
    return summary


def figures_of(values: np.ndarray, perfect: float | None) -> dict[str, Any]:
    """Return mean, count of perfect scores and count of (N,) scores; NaN marks samples without a score."""
    valid = values[~np.isnan(values)]
    figures: dict[str, Any] = {"mean": float(valid.mean(dtype=np.float64))} if len(valid) else {}
    if perfect is not None:
        figures["exact"] = int((valid >= perfect).sum())
    return {**figures, "scored": len(valid)}
