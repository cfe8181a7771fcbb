"""The samples of a report: pairs before and after training, extremes of the last epoch, and the result over prompts."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
import pyarrow as pa
from PIL import Image

from storage.trajectories.tables import read_shard
from tasks.algorithms.resampling import Estimate, mean_with_interval
from tasks.metrics.evaluations import SPLITS, split_of
from tasks.metrics.image_grids import strip
from tasks.reports.clips import film_of
from tasks.reports.reading import pictures_of, references_of, rows_of
from tasks.runs.chain import Chain
from tasks.runs.context import RunContext

#: Samples shown of the best, of the worst, and of the most changed.
_SHOWN = 6
#: Longest side in pixels of input images, and of images shown without loss; longest side of all others.
_SMALL, _LARGE = 256, 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Shot:
    """A sample."""

    sample_id: str
    """Its id."""
    prompt: str
    """Its prompt."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """The result of a run: its weighted reward before and after training, with 95 % intervals over prompts."""

    split: str
    """The prompt list: 'heldout', or 'train' if no prompts are held out."""
    prompts: int
    """Number of its prompts with a score."""
    before: Estimate
    """Before training."""
    after: Estimate
    """After the last evaluated epoch."""
    change: Estimate
    """The difference, over the same prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleScores:
    """The scores of a sample."""

    sample_id: str
    """Its id."""
    prompt_id: str
    """The id of its prompt."""
    split: str
    """Its prompt list."""
    reward: float | None
    """Its weighted sum of rewards; None without a score."""
    verdict: str
    """Its scores in words, with the remarks of rewards."""


def evaluated(chain: Chain, epoch: int) -> dict[str, SampleScores]:
    """Return the scores of the samples of an epoch's evaluation by sample id, in order."""
    found: dict[str, SampleScores] = {}
    for section in (*chain.config.rewards, *chain.config.evaluate.judges):
        entry = chain.find(epoch, "judge", section.slot)
        weight = section.weight if section in chain.config.rewards else None
        if entry is None:
            continue
        for record in chain.store.shards(entry.ref):
            for row in read_shard(chain.store, entry.ref, record).to_pylist():
                sample, prompt, split = row["sample_id"], row["prompt_id"], split_of(record.shard)
                old = found.get(
                    sample, SampleScores(sample_id=sample, prompt_id=prompt, split=split, reward=None, verdict="")
                )
                score, note = row["reward"], row["note"]
                said = f"{section.slot} {score:.3g}" if score is not None else section.slot
                said += f" ({note})" if note else ""
                optimized = weight is not None and score is not None
                found[sample] = replace(
                    old,
                    reward=(old.reward or 0.0) + weight * score if optimized else old.reward,
                    verdict=f"{old.verdict}, {said}" if old.verdict else said,
                )
    return found


def headline(
    first: Mapping[str, float],
    final: Mapping[str, float],
    before: Iterable[SampleScores],
    after: Iterable[SampleScores],
) -> Headline | None:
    """Return the result of a run; None without scores of both evaluations on a common prompt list.

    Args:
        first: the weighted reward of epoch 0 by prompt list.
        final: the same of the last evaluated epoch.
        before: the scores of epoch 0.
        after: the scores of the last evaluated epoch.
    """
    split = next((name for name in SPLITS if name in first and name in final), None)
    if split is None:
        return None
    one, other = (_by_prompt(each for each in rows if each.split == split) for rows in (before, after))
    scores = np.array([(one[prompt], other[prompt]) for prompt in one if prompt in other]).reshape(-1, 2)
    if len(scores) == 0:
        return None
    # The means are those of every table: over samples, while the intervals are over prompts.
    old, new, change = (
        replace(mean_with_interval(values), mean=mean)
        for values, mean in (
            (scores[:, 0], first[split]),
            (scores[:, 1], final[split]),
            (scores[:, 1] - scores[:, 0], final[split] - first[split]),
        )
    )
    if np.array_equal(scores[:, 0], scores[:, 1]):
        # Equal scores say nothing about the spread of differences.
        change = replace(change, low=None, high=None)
    return Headline(split=split, prompts=len(scores), before=old, after=new, change=change)


def _by_prompt(rows: Iterable[SampleScores]) -> dict[str, float]:
    scores: dict[str, list[float]] = {}
    for row in rows:
        if row.reward is not None:
            scores.setdefault(row.prompt_id, []).append(row.reward)
    return {prompt: fmean(each) for prompt, each in scores.items()}


def pairs(
    context: RunContext, last: int, before: Mapping[str, SampleScores], after: Mapping[str, SampleScores]
) -> tuple[dict[str, list[Pair]], list[Pair]]:
    """Return one pair for each of the first ``evaluate.images`` prompts of every list, and the most changed pairs.

    Args:
        context: the run.
        last: the last evaluated epoch.
        before: the scores of epoch 0 by sample id.
        after: the scores of the last evaluated epoch by sample id.
    """
    both = [row for sample, row in after.items() if sample in before] if last else []
    most = context.config.evaluate.images
    first = {split: _first_of_each([row for row in both if row.split == split], most) for split in SPLITS}

    def change(row: SampleScores) -> float:
        old = before[row.sample_id].reward
        return 0.0 if old is None or row.reward is None else abs(row.reward - old)

    changed = sorted((row for row in both if change(row) > 0), key=lambda row: (-change(row), row.sample_id))
    extremes = _first_of_each(changed, min(_SHOWN, most))
    wanted = {row.sample_id for row in (*first["heldout"], *first["train"], *extremes)}
    old, new = (
        _shots(context, epoch, [rows[sample] for sample in sorted(wanted)], evaluation=True)
        for epoch, rows in ((0, before), (last, after))
    )

    def paired(rows: Sequence[SampleScores]) -> list[Pair]:
        names = [row.sample_id for row in rows if row.sample_id in old and row.sample_id in new]
        return [Pair(before=old[name], after=new[name]) for name in names]

    return {split: paired(rows) for split, rows in first.items() if paired(rows)}, paired(extremes)


def extremes(context: RunContext, epoch: int, table: pa.Table) -> tuple[list[Shot], list[Shot]]:
    """Return the samples of an epoch's rollout with the best and the worst rewards, best and worst first."""
    rows = [
        SampleScores(
            sample_id=row["sample_id"],
            prompt_id=row["prompt_id"],
            split="train",
            reward=row["reward"],
            verdict=f"reward {row['reward']:.3g}, advantage {row['advantage']:+.2f}",
        )
        for row in table.to_pylist()
        if row["reward"] is not None
    ]
    rows.sort(key=lambda row: (row.reward, row.sample_id))
    middle = sum(row.reward or 0.0 for row in rows) / max(1, len(rows))
    # One sample per prompt: otherwise one easy or hard prompt takes all places. Its worst sample may still be good.
    worst = _first_of_each([row for row in rows if (row.reward or 0.0) < middle], _SHOWN)
    best = _first_of_each([row for row in rows[::-1] if (row.reward or 0.0) > middle], _SHOWN)
    found = _shots(context, epoch, [*best, *worst], evaluation=False)
    shown = [[found[row.sample_id] for row in each if row.sample_id in found] for each in (best, worst)]
    return shown[0], shown[1]


def _first_of_each(rows: Iterable[SampleScores], most: int) -> list[SampleScores]:
    """Return the first row of each prompt, in order, up to ``most`` rows."""
    found: dict[str, SampleScores] = {}
    for row in rows:
        found.setdefault(row.prompt_id, row)
    return list(found.values())[:most]


def _shots(context: RunContext, epoch: int, rows: Sequence[SampleScores], *, evaluation: bool) -> dict[str, Shot]:
    """Return the samples by id, without those of which neither an image nor a text is stored."""
    chain, wanted = context.chain, {row.sample_id for row in rows}
    if not wanted:
        return {}
    ref = chain.require(epoch, "evaluate" if evaluation else "rollout").ref
    places = {sample: (shard, number) for sample, shard, number in rows_of(context.store, ref, wanted)}
    drawn = pictures_of(chain, epoch, wanted, evaluation=evaluation) if context.config.render is not None else {}
    started, fps = references_of(context, ref, wanted), context.config.rollout.media.fps
    shots: dict[str, Shot] = {}
    for row in rows:
        shard, number = places[row.sample_id]
        media = drawn.get(row.sample_id)
        if media is None and shard.media_format(number):
            media = shard.media(number)
        text = shard.text(number)
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


def _encoded(pixels: np.ndarray, most: int) -> bytes:
    """Return an (H, W, 3) uint8 image as PNG if it is small, otherwise as WebP with ``most`` pixels a side at most."""
    image, data = Image.fromarray(pixels), io.BytesIO()
    if max(image.size) <= _SMALL:
        image.save(data, "PNG")
    else:
        image.thumbnail((most, most))
        image.save(data, "WEBP", quality=90)
    return data.getvalue()
