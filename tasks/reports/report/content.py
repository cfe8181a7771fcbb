"""The content of a report, read from committed artifacts. No HTML here."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import yaml

from configs.escaping import command
from configs.load import asks_for
from storage.trajectories.tables import read_rows
from tasks.metrics.alerts import alerts
from tasks.metrics.evaluations import Figures, evaluated_epochs, evaluation_figures, weighted_rewards
from tasks.metrics.speed import epoch_speeds, in_words, seconds_of
from tasks.metrics.tracked import paragraphs
from tasks.reports.reading import curve_points, trained_epochs
from tasks.reports.report.samples import Headline, Pair, Shot, evaluated, extremes, headline, pairs
from tasks.runs.chain import Chain
from tasks.runs.context import RunContext
from tasks.runs.staleness import standings
from tasks.specs.graph import Node

#: The beginning of a place on a machine: an absolute path, or the address of a file.
_PLACE = re.compile(r"(file:|sqlite:)|~?[/\\]|[A-Za-z]:[/\\]")

Curve = list[tuple[int, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """The cost of one stage over the whole run."""

    stage: str
    """Its name."""
    artifacts: int
    """Number of its artifacts."""
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
    """Its name."""
    epochs: tuple[int, int]
    """Trained epochs, and configured epochs."""
    about: str
    """Its description."""
    reward: str
    """The name of its weighted reward."""
    headline: Headline | None
    """Its result; None before the first evaluation of a trained model."""
    export: tuple[str, str]
    """The artifact of its exported model, empty before the export, and the command that copies it."""
    warnings: Sequence[str]
    """Its alerts."""
    curves: Mapping[str, Curve]
    """By key of the tracker: (epoch or update, value)."""
    results: tuple[int, Figures, Figures]
    """Last evaluated epoch, the scores of epoch 0, and the scores of that epoch."""
    pairs: Mapping[str, Sequence[Pair]]
    """By prompt list: a sample of each of the first prompts, before and after."""
    changed: Sequence[Pair]
    """The samples of the evaluations whose rewards changed most."""
    best: Sequence[Shot]
    """Best samples of the last epoch."""
    worst: Sequence[Shot]
    """Worst samples of the last epoch."""
    rewards: Mapping[int, np.ndarray]
    """Optimized sums of all samples of the first and the last epoch, (samples,)."""
    spreads: Mapping[int, np.ndarray]
    """Standard deviations within groups of these epochs, (groups,)."""
    states: Mapping[str, int]
    """Numbers of fresh, stale and missing stages."""
    stale: Sequence[str]
    """Stale stages, each with the reason."""
    costs: Sequence[StageCost]
    """Cost by stage."""
    lineage: Sequence[tuple[str, str, Sequence[str]]]
    """Stage, artifact and inputs of epoch 0 and the last epoch."""
    config: str
    """Its config, YAML, without places on a machine."""
    settings: Mapping[str, Any]
    """Flat settings that affect its artifacts."""


def read_run(context: RunContext) -> RunReport:
    """Read the report content of a run.

    Raises:
        CorruptError: a file of the run is damaged.
    """
    chain, config = context.chain, context.config
    context.store.remember(map(chain.ref, chain.nodes()), records=True)
    trained, last = trained_epochs(chain), max(evaluated_epochs(chain), default=0)
    of_epochs = [trained[0], trained[-1]] if trained else []
    tables = {epoch: read_rows(context.store, chain.require(epoch, "advantage").ref) for epoch in of_epochs}
    best, worst = extremes(context, of_epochs[-1], tables[of_epochs[-1]]) if trained else ([], [])
    before, after = evaluated(chain, 0), evaluated(chain, last)
    figures = (evaluation_figures(chain, 0), evaluation_figures(chain, last))
    first, final = (weighted_rewards(config, each) for each in figures)
    paired, changed = pairs(context, last, before, after)
    found, exported = standings(chain), chain.find(config.run.epochs, "export")
    rewards, values = config.rewards, _portable(config.model_dump(mode="json"))
    plain = len(rewards) == 1 and rewards[0].weight == 1
    return RunReport(
        name=context.run.name,
        epochs=(trained[-1] if trained else 0, config.run.epochs),
        about=paragraphs(context, done=False)[0],
        reward=rewards[0].slot if plain else " + ".join(f"{each.weight:g} x {each.slot}" for each in rewards),
        headline=headline(first, final, before.values(), after.values()) if last else None,
        export=(
            exported.artifact if exported is not None else "",
            command("flowmill", "export", context.run.name, "--to", f"{context.run.name}-model"),
        ),
        warnings=[alert.text for alert in alerts(chain)],
        curves=_curves(chain),
        results=(last, *figures),
        pairs=paired,
        changed=changed,
        best=best,
        worst=worst,
        rewards={epoch: _known(table, "reward") for epoch, table in tables.items()},
        spreads={epoch: _spreads(table) for epoch, table in tables.items()},
        states=Counter(standing.state.value for standing in found),
        stale=[f"{s.node}: {'; '.join(cause.text for cause in s.causes)}" for s in found if s.state.value == "stale"],
        costs=_costs(chain, trained[-1] if trained else 0),
        lineage=_lineage(chain, of_epochs[-1:]),
        config=yaml.safe_dump(values, sort_keys=False, allow_unicode=True),
        settings=asks_for(values),
    )


def _portable(value: Any) -> Any:
    """Return settings with only the last name of every absolute path: reports go to people without that machine."""
    if isinstance(value, dict):
        return {key: _portable(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_portable(each) for each in value]
    if isinstance(value, str) and _PLACE.match(value):
        return "…/" + re.split(r"[/\\]", value.rstrip("/\\"))[-1]
    return value


def _curves(chain: Chain) -> dict[str, Curve]:
    curves: dict[str, Curve] = {}
    for point in curve_points(chain):
        curves.setdefault(point.key, []).append((point.step, point.value))
    return curves


def _known(table: pa.Table, column: str) -> np.ndarray:
    return np.asarray(table.column(column).drop_null().to_numpy(), np.float64)


def _spreads(table: pa.Table) -> np.ndarray:
    grouped = table.filter(table.column("reward").is_valid()).group_by("group_id").aggregate([("reward", "stddev")])
    return np.asarray(grouped.column("reward_stddev").to_numpy(), np.float64)


def _costs(chain: Chain, epoch: int) -> list[StageCost]:
    store, speeds = chain.store, epoch_speeds(chain, epoch)
    made: dict[str, list[tuple[float, int]]] = {}
    for entry in chain.entries():
        manifest = store.manifest(entry.ref)
        if manifest is not None:
            made.setdefault(entry.stage, []).append((seconds_of(chain, entry.ref), manifest.size))
    return [
        StageCost(
            stage=stage,
            artifacts=len(each),
            seconds=sum(s for s, _ in each),
            size=sum(b for _, b in each),
            speed=in_words(speeds.get(stage, {})),
        )
        for stage, each in made.items()
    ]


def _lineage(chain: Chain, epochs: Sequence[int]) -> list[tuple[str, str, Sequence[str]]]:
    found: list[tuple[str, str, Sequence[str]]] = []
    for entry in chain.entries():
        manifest = chain.store.manifest(entry.ref) if entry.epoch in (0, *epochs) else None
        if manifest is not None:
            found.append((str(Node(*entry.key)), entry.artifact, manifest.inputs))
    return found
