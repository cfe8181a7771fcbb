"""The result of a run over prompts: its weighted reward before and after training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flowmill.tasks.algorithms.resampling import Estimate, mean_with_interval
from flowmill.tasks.metrics.evaluations import SPLITS, mean_by_prompt
from flowmill.tasks.metrics.view import RunView


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """The result of a run: its weighted reward before and after training, with 95 % intervals over prompts."""

    split: str
    """The prompt list: 'heldout', or 'train' if no prompts are held out."""
    prompts: int
    """Number of its prompts with a score."""
    before: Estimate
    after: Estimate
    """After the last evaluated epoch."""
    change: Estimate
    """The difference, over the same prompts."""
    left_out: int = 0
    """Number of its prompts with a score of one of the evaluations alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleScores:
    """The scores of a sample."""

    sample_id: str
    prompt_id: str
    split: str
    reward: float | None
    """Its weighted sum of rewards; None without a score, or if one failed."""
    verdict: str
    """Its scores in words, with the remarks of rewards."""


def evaluated(view: RunView, epoch: int) -> dict[str, SampleScores]:
    """Return the scores of the samples of an epoch's evaluation by sample id, in order."""
    weights = {section.slot: section.weight for section in view.config.rewards}
    slots = [*weights, *(section.slot for section in view.config.evaluate.judges)]

    def scored(row: Mapping[str, Any]) -> SampleScores:
        optimized = [weights[slot] * row[f"reward.{slot}"] for slot in weights if row.get(f"reward.{slot}") is not None]
        failed = any(row.get(f"reward.{slot}") is None and row.get(f"note.{slot}") for slot in weights)
        verdicts = [_verdict(slot, row) for slot in slots if f"reward.{slot}" in row]
        return SampleScores(
            sample_id=row["sample_id"],
            prompt_id=row["prompt_id"],
            split=row["list"],
            reward=sum(optimized) if optimized and not failed else None,
            verdict=", ".join(verdicts),
        )

    return {row["sample_id"]: scored(row) for row in view.scores(epoch, evaluation=True).to_pylist()}


def _verdict(slot: str, row: Mapping[str, Any]) -> str:
    score, note = row[f"reward.{slot}"], row[f"note.{slot}"]
    return " ".join([slot, *([f"{score:.3g}"] if score is not None else []), *([f"({note})"] if note else [])])


def headline(
    first: Mapping[str, float],
    final: Mapping[str, float],
    before: Iterable[SampleScores],
    after: Iterable[SampleScores],
    bounds: tuple[float, float],
) -> Headline | None:
    """Return the result of a run; None without scores of both evaluations on a common prompt list.

    Args:
        first: the weighted reward of epoch 0 by prompt list.
        final: the same of the last evaluated epoch.
        before: the scores of epoch 0.
        after: the scores of the last evaluated epoch.
        bounds: lowest and highest possible weighted reward.
    """
    split = next((name for name in SPLITS if name in first and name in final), None)
    if split is None:
        return None
    sides = [[row for row in rows if row.split == split and row.reward is not None] for rows in (before, after)]
    one, other = (mean_by_prompt((row.prompt_id, row.reward) for row in rows) for rows in sides)
    scores = np.array([(one[prompt], other[prompt]) for prompt in one if prompt in other]).reshape(-1, 2)
    if len(scores) == 0:
        return None
    # The means are those of every table: over samples, while the intervals are over prompts. Means of other samples
    # than before do not compare.
    alike = len({frozenset(row.sample_id for row in rows) for rows in sides}) == 1
    means = (first[split], final[split]) if alike else scores.mean(0)
    most = bounds[1] - bounds[0]
    old, new, change = (
        replace(mean_with_interval(values, bounds=within), mean=float(mean))
        for values, mean, within in (
            (scores[:, 0], means[0], bounds),
            (scores[:, 1], means[1], bounds),
            (scores[:, 1] - scores[:, 0], means[1] - means[0], (-most, most)),
        )
    )
    if np.array_equal(scores[:, 0], scores[:, 1]):
        # Equal scores do not give the spread of differences.
        change = replace(change, low=None, high=None)
    left_out = len(one.keys() ^ other.keys())
    return Headline(split=split, prompts=len(scores), before=old, after=new, change=change, left_out=left_out)
