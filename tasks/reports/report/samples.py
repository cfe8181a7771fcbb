"""The samples of a report: pairs before and after training, and extremes of the last epoch."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from PIL import Image

from flowmill.storage.trajectories.tables import read_rows
from flowmill.tasks.metrics.evaluations import SPLITS
from flowmill.tasks.metrics.image_grids import strip
from flowmill.tasks.metrics.samples import film_of, places_of
from flowmill.tasks.metrics.view import RunView
from flowmill.tasks.reports.report.headline import SampleScores
from flowmill.tasks.specs.turns import turns_of

#: Samples shown of the best, of the worst, and of the most changed.
_SHOWN = 6
#: Given samples that are shown.
_GIVEN = 12
#: Longest side in pixels of input images, and of images shown without loss; longest side of all others.
_SMALL, _LARGE = 256, 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Shot:
    """A sample."""

    sample_id: str
    prompt: str
    verdict: str
    """Its scores in words, with the remarks of rewards."""
    reward: float | None
    """Its weighted sum of rewards; None without a score."""
    image: bytes | None
    """PNG or WebP; for a clip its first, middle and last frame."""
    film: bytes | None
    """An mp4 of a clip with sound, None for every other sample."""
    text: str | None
    """The text of a text sample."""
    references: Sequence[bytes] = ()
    """Small images that its prompt starts from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A sample of the first and the last evaluation, from the same prompt and noise."""

    before: Shot
    """Of the base model."""
    after: Shot
    """Of the trained model."""


def pairs(
    view: RunView, last: int, before: Mapping[str, SampleScores], after: Mapping[str, SampleScores]
) -> tuple[dict[str, list[Pair]], list[Pair]]:
    """Return one pair for each of the first ``evaluate.images`` prompts of every list, and the most changed pairs.

    Args:
        last: the last evaluated epoch.
        before: the scores of epoch 0 by sample id.
        after: the scores of the last evaluated epoch by sample id.
    """
    both = [row for sample, row in after.items() if sample in before] if last else []
    most = view.config.evaluate.images
    first = {split: first_of_each([row for row in both if row.split == split], most) for split in SPLITS}

    def change(row: SampleScores) -> float:
        old = before[row.sample_id].reward
        return 0.0 if old is None or row.reward is None else abs(row.reward - old)

    changed = sorted((row for row in both if change(row) > 0), key=lambda row: (-change(row), row.sample_id))
    extremes = first_of_each(changed, min(_SHOWN, most))
    requested = {row.sample_id for row in (*first["heldout"], *first["train"], *extremes)}
    old, new = (
        shots_of(view, epoch, [rows[sample] for sample in sorted(requested)], evaluation=True)
        for epoch, rows in ((0, before), (last, after))
    )

    def paired(rows: Sequence[SampleScores]) -> list[Pair]:
        names = [row.sample_id for row in rows if row.sample_id in old and row.sample_id in new]
        return [Pair(before=old[name], after=new[name]) for name in names]

    return {split: paired(rows) for split, rows in first.items() if paired(rows)}, paired(extremes)


def extremes(view: RunView, epoch: int, table: pa.Table) -> tuple[list[Shot], list[Shot]]:
    """Return the samples of an epoch's rollout with the best and the worst rewards, best and worst first."""
    table = table.filter(table.column("reward").is_valid())
    order = pc.sort_indices(table, [("reward", "ascending"), ("sample_id", "ascending")]).to_numpy()
    rewards = table.column("reward").to_numpy().astype(np.float64)
    middle = rewards.mean() if len(rewards) and rewards.min() < rewards.max() else np.nan

    def rows(numbers: Iterable[int]) -> Iterator[SampleScores]:
        for number in numbers:
            (row,) = table.slice(number, 1).to_pylist()
            yield _scored(row, f"reward {row['reward']:.3g}, advantage {row['advantage']:+.2f}")

    # One sample per prompt: otherwise one easy or hard prompt takes all places. Its worst sample may still be good.
    worst = first_of_each(rows(order[rewards[order] < middle]), _SHOWN)
    best = first_of_each(rows(order[rewards[order] > middle][::-1]), _SHOWN)
    shots = shots_of(view, epoch, [*best, *worst], evaluation=False)
    shown = [[shots[row.sample_id] for row in each if row.sample_id in shots] for each in (best, worst)]
    return shown[0], shown[1]


def ingested_shots(view: RunView) -> list[Shot]:
    """Return the first ingested samples, both of a pair; none before they are ingested."""
    data = view.config.data
    entry = None if data is None else view.chain.find(*view.chain.plan.samples_of(0))
    if data is None or entry is None:
        return []
    table = read_rows(view.store, entry.ref, "rewards").slice(0, _GIVEN).to_pylist()
    rows = []
    for row in table:
        rated = "" if row["reward"] is None else f"rating {row['reward']:g}"
        rows.append(_scored(row, ("chosen" if row["reward"] else "rejected") if data.paired else rated))
    shots = shots_of(view, 0, rows, evaluation=False)
    return [shots[row.sample_id] for row in rows if row.sample_id in shots]


def _scored(row: Mapping[str, Any], verdict: str) -> SampleScores:
    names = {name: row[name] for name in ("sample_id", "prompt_id", "reward")}
    return SampleScores(**names, split="train", verdict=verdict)


def first_of_each(rows: Iterable[SampleScores], most: int) -> list[SampleScores]:
    """Return the first row of each prompt, in order, up to ``most`` rows."""
    by_prompt: dict[str, SampleScores] = {}
    for row in rows if most else ():
        by_prompt.setdefault(row.prompt_id, row)
        if len(by_prompt) == most:
            break
    return list(by_prompt.values())


def shots_of(view: RunView, epoch: int, rows: Sequence[SampleScores], *, evaluation: bool) -> dict[str, Shot]:
    """Return the samples by id, without those of which neither an image nor a text is stored."""
    requested = {row.sample_id for row in rows}
    if not requested:
        return {}
    ref = view.chain.require(*view.chain.plan.samples_of(epoch, evaluation=evaluation)).ref
    places = places_of(view.store, ref, requested)
    drawn = view.pictures(epoch, requested, evaluation=evaluation) if view.config.render is not None else {}
    conversations = _conversations(view, epoch, evaluation=evaluation)
    started, fps = view.references(epoch, requested, evaluation=evaluation), view.config.rollout.media.fps
    shots: dict[str, Shot] = {}
    for row in rows:
        shard, number = places[row.sample_id]
        media = drawn.get(row.sample_id)
        if media is None and shard.media_format(number):
            media = shard.media(number)
        text = conversations.get(row.sample_id, shard.text(number))
        if media is not None or text is not None:
            shots[row.sample_id] = Shot(
                sample_id=row.sample_id,
                prompt=shard.table.column("prompt")[number].as_py(),
                verdict=row.verdict,
                reward=row.reward,
                image=None if media is None else _encoded(strip(media) if media.ndim == 4 else media, _LARGE),
                film=film_of(shard, number, fps=fps),
                text=text,
                references=[_encoded(image, _SMALL) for image in started[row.sample_id]],
            )
    return shots


def _conversations(view: RunView, epoch: int, *, evaluation: bool) -> dict[str, str]:
    """Return the texts of all turns and the comments between them, a line each, by sample; none without turns."""
    turns, lines = turns_of(view.config), dict[str, list[str]]()
    if turns is None:
        return {}
    for row in view.turns(epoch, evaluation=evaluation).to_pylist():
        # The last line is a comment that no text answers, if the sample ended early.
        lines.setdefault(row["sample_id"], []).extend([row["text"], turns.said(row["note"] or "", row["reward"])])
    return {sample: "\n".join(each[:-1]) for sample, each in lines.items()}


def _encoded(pixels: np.ndarray, most: int) -> bytes:
    """Return an (H, W, 3) uint8 image as PNG if it is small, otherwise as WebP with ``most`` pixels a side at most."""
    image, data = Image.fromarray(pixels), io.BytesIO()
    if max(image.size) <= _SMALL:
        image.save(data, "PNG")
    else:
        image.thumbnail((most, most))
        image.save(data, "WEBP", quality=90)
    return data.getvalue()
