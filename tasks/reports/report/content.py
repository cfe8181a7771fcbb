"""The content of a report. No HTML here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flowmill.tasks.metrics.evaluations import Figures
from flowmill.tasks.reports.data_tables import Tables
from flowmill.tasks.reports.report.headline import Headline
from flowmill.tasks.reports.report.samples import Pair, Shot

Curve = list[tuple[int, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """The cost of one stage over the whole run."""

    stage: str
    artifacts: int
    seconds: float
    """Seconds of work on them, over all processes."""
    size: int
    """Size of the artifacts in bytes."""
    speed: str
    """Speed in the last epoch, in words; empty where no model works."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """The report content of one run."""

    name: str
    epochs: tuple[int, int]
    """Trained epochs, and configured epochs."""
    description: str
    reward: str
    headline: Headline | None
    """Its result; None before the first evaluation of a trained model."""
    export: tuple[str, str]
    """The artifact of its exported model, empty before the export, and the command that copies it."""
    warnings: Sequence[str]
    curves: Mapping[str, Curve]
    """By key of the tracker: (epoch or update, value)."""
    results: tuple[int, Figures, Figures]
    """Last evaluated epoch, the scores of epoch 0, and the scores of that epoch."""
    judges: Sequence[str]
    """Names of the rewards of evaluations that training does not optimize."""
    pairs: Mapping[str, Sequence[Pair]]
    """By prompt list: a sample of each of the first prompts, before and after."""
    changed: Sequence[Pair]
    """The samples of the evaluations whose rewards changed most."""
    data: Tables
    ingested: Sequence[Shot]
    best: Sequence[Shot]
    worst: Sequence[Shot]
    rewards: Mapping[int, np.ndarray]
    """Optimized sums of all samples of the first and the last epoch, (samples,)."""
    spreads: Mapping[int, np.ndarray]
    """Standard deviations within groups of these epochs, (groups,)."""
    states: Mapping[str, int]
    """Numbers of stages by their state, in words."""
    stale: Sequence[str]
    """Stale stages, each with the reason."""
    costs: Sequence[StageCost]
    lineage: Sequence[tuple[str, str, Sequence[str]]]
    """Stage, artifact and inputs of epoch 0 and the last epoch."""
    config: str
    """Its config, YAML, without places on a machine."""
    settings: Mapping[str, Any]
    """Flat settings that affect its artifacts."""
