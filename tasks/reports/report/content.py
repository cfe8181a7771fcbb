"""The content of a report, read from committed artifacts. No HTML here."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image

from configs.load import asks_for, dump_yaml
from storage.trajectories.base import TrajectoryShard
from storage.trajectories.tables import read_rows
from tasks.metrics.alerts import alerts
from tasks.metrics.evaluations import (
    Figures,
    evaluated_epochs,
    evaluation_figures,
    evaluation_grids,
    evaluation_texts,
)
from tasks.metrics.image_grids import strip
from tasks.metrics.speed import epoch_speeds, in_words, seconds_of
from tasks.metrics.texts import Text
from tasks.metrics.tracked import paragraphs
from tasks.reports.clips import film_of
from tasks.reports.reading import curve_points, pictures_of, references_of, rows_of, trained_epochs
from tasks.runs.chain import Chain
from tasks.runs.context import RunContext
from tasks.runs.staleness import standings
from tasks.specs.graph import Node

#: Samples shown of the best, and of the worst.
_SHOWN = 6
#: Longest side of a prompt's input images, in pixels.
_STARTED = 256

Curve = list[tuple[int, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shot:
    """A sample of the last epoch."""

    sample_id: str
    """Its id."""
    prompt: str
    """Its prompt."""
    reward: float
    """Its optimized sum."""
    advantage: float
    """Its advantage."""
    image: bytes | None
    """PNG; for a clip its first, middle and last frame."""
    film: bytes | None
    """An mp4 of a clip with sound, None for every other sample."""
    text: str | None
    """The text of a text sample."""
    references: Sequence[bytes] = ()
    """Small PNGs of its prompt's input images."""


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
    root: str
    """Where its store is."""
    epochs: tuple[int, int]
    """Trained epochs, and configured epochs."""
    words: Sequence[str]
    """Its description and its results, one paragraph each."""
    warnings: Sequence[str]
    """Alerts of monitors."""
    curves: Mapping[str, Curve]
    """By key of the tracker: (epoch or update, value)."""
    results: tuple[int, Figures, Figures]
    """Last evaluated epoch, the scores of epoch 0, and the scores of that epoch."""
    grids: Mapping[str, tuple[bytes, bytes]]
    """By prompt list: PNG of the first and the last evaluation, from the same noise."""
    texts: Mapping[str, Sequence[tuple[str, Text, Text]]]
    """By prompt list: prompts, each with its text of the first and the last evaluation."""
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
    """Its config, YAML."""
    settings: Mapping[str, Any]
    """Flat settings that affect its artifacts."""


def read_run(context: RunContext) -> RunReport:
    """Read the report content of a run.

    Raises:
        CorruptError: a file of the run is damaged.
    """
    chain, config = context.chain, context.config
    context.store.remember(map(chain.ref, chain.nodes()), records=True)
    trained = trained_epochs(chain)
    evaluated = evaluated_epochs(chain)
    last = evaluated[-1] if evaluated else 0
    of_epochs = [trained[0], trained[-1]] if trained else []
    tables = {epoch: read_rows(context.store, chain.require(epoch, "advantage").ref) for epoch in of_epochs}
    best, worst = _shots(context, of_epochs[-1], tables[of_epochs[-1]]) if trained else ([], [])
    found = standings(chain)
    about, *results = paragraphs(context, done=last > 0)
    return RunReport(
        name=context.run.name,
        root=context.store.root.uri,
        epochs=(trained[-1] if trained else 0, config.run.epochs),
        words=[f"{context.run.name} {about}", *results],
        warnings=[alert.text for alert in alerts(chain)],
        curves=_curves(chain),
        results=(last, evaluation_figures(chain, 0), evaluation_figures(chain, last)),
        grids=_grids(chain, last),
        texts=_texts(chain, last),
        best=best,
        worst=worst,
        rewards={epoch: _known(table, "reward") for epoch, table in tables.items()},
        spreads={epoch: _spreads(table) for epoch, table in tables.items()},
        states=Counter(standing.state.value for standing in found),
        stale=[f"{s.node}: {'; '.join(cause.text for cause in s.causes)}" for s in found if s.state.value == "stale"],
        costs=_costs(chain, trained[-1] if trained else 0),
        lineage=_lineage(chain, of_epochs[-1:]),
        config=dump_yaml(config),
        settings=asks_for(config.model_dump(mode="json")),
    )


def _curves(chain: Chain) -> dict[str, Curve]:
    curves: dict[str, Curve] = {}
    for point in curve_points(chain):
        curves.setdefault(point.key, []).append((point.step, point.value))
    return curves


def _grids(chain: Chain, last: int) -> dict[str, tuple[bytes, bytes]]:
    before, after = evaluation_grids(chain, 0), evaluation_grids(chain, last)
    return {split: (before[split].read_bytes(), after[split].read_bytes()) for split in after if split in before}


def _texts(chain: Chain, last: int) -> dict[str, list[tuple[str, Text, Text]]]:
    before, after = evaluation_texts(chain, 0), evaluation_texts(chain, last)
    return {
        split: [(old.prompt, old, new) for old, new in zip(before[split], after[split], strict=False)]
        for split in after
        if split in before
    }


def _shots(context: RunContext, epoch: int, table: pa.Table) -> tuple[list[Shot], list[Shot]]:
    """Return the samples of an epoch with the best and the worst rewards, where images or texts are stored."""
    rows = [row for row in table.to_pylist() if row["reward"] is not None]
    rows.sort(key=lambda row: (row["reward"], row["sample_id"]))
    middle = sum(row["reward"] for row in rows) / max(1, len(rows))
    # One sample per prompt: otherwise one easy or hard prompt takes all places. Its worst sample may still be good.
    worst = _first_of_each([row for row in rows if row["reward"] < middle])
    best = _first_of_each([row for row in rows[::-1] if row["reward"] > middle])
    rollout, wanted = context.chain.require(epoch, "rollout").ref, {row["sample_id"] for row in (*best, *worst)}
    found = rows_of(context.store, rollout, wanted)
    places = {sample: (shard, row) for sample, shard, row in found}
    drawn = pictures_of(context.chain, epoch, wanted) if context.config.render is not None else {}
    started, fps = references_of(context, rollout, wanted), context.config.rollout.media.fps
    shots = [[_shot(row, places, drawn, started[row["sample_id"]], fps) for row in rows] for rows in (best, worst)]
    seen = [[shot for shot in each if shot.image is not None or shot.text is not None] for each in shots]
    return seen[0], seen[1]


def _first_of_each(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the first row of each prompt, in order, up to ``_SHOWN`` rows."""
    found: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        found.setdefault(row["prompt_id"], row)
    return list(found.values())[:_SHOWN]


def _shot(
    row: Mapping[str, Any],
    places: Mapping[str, tuple[TrajectoryShard, int]],
    drawn: Mapping[str, np.ndarray],
    started: Sequence[np.ndarray],
    fps: int,
) -> Shot:
    shard, number = places[row["sample_id"]]
    media = drawn.get(row["sample_id"])
    if media is None and shard.media_format(number):
        media = shard.media(number)
    return Shot(
        sample_id=row["sample_id"],
        prompt=shard.table.column("prompt")[number].as_py(),
        reward=row["reward"],
        advantage=row["advantage"],
        image=None if media is None else _image(media),
        film=film_of(shard, number, fps=fps),
        text=shard.text(number),
        references=[_png(Image.fromarray(image), _STARTED) for image in started],
    )


def _image(media: np.ndarray) -> bytes:
    return _png(Image.fromarray(strip(media) if media.ndim == 4 else media))


def _png(image: Image.Image, most: int | None = None) -> bytes:
    data = io.BytesIO()
    if most is not None:
        image.thumbnail((most, most))
    image.save(data, "PNG")
    return data.getvalue()


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
