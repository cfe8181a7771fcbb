"""The pairs or groups of samples that raters see, and which one comes next. Every draw follows from the seed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from flowmill.configs.errors import StoreError
from flowmill.configs.fingerprint import fingerprint
from flowmill.configs.suggestions import did_you_mean
from flowmill.storage.trajectories.media import DEFAULT_MEDIA, MediaFormat
from flowmill.tasks.metrics.evaluations import finished_evaluations
from flowmill.tasks.metrics.view import RunView
from flowmill.tasks.ratings.answers import Key
from flowmill.tasks.runs.context import RunContext

#: Columns of the tables of samples that pairs have, if present.
_COLUMNS = ("sample_id", "prompt_id", "prompt", "replica", "text", "media_format")


@dataclass(frozen=True, kw_only=True)
class SampleSource:
    """The samples of one rollout or evaluation."""

    context: RunContext
    epoch: int
    evaluation: bool
    """Whether they are of the evaluation of the epoch, not of its rollout."""
    scorer: str | None = None
    """Name of the reward whose scores are read."""

    @cached_property
    def artifact(self) -> str:
        """The artifact of the samples, ``kind/id``."""
        return self.context.chain.require(
            *self.context.plan.samples_of(self.epoch, evaluation=self.evaluation)
        ).artifact

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """A row per sample: identity, prompt, text, format, and 'score', infinite without one."""
        table = RunView(self.context).samples(self.epoch, evaluation=self.evaluation)
        names = [name for name in table.column_names if name in _COLUMNS]
        scores: Sequence[float | None] = [0.0] * table.num_rows
        if self.scorer is not None:
            scorers = [name.removeprefix("reward.") for name in table.column_names if name.startswith("reward.")]
            if self.scorer not in scorers:
                hint = did_you_mean(self.scorer, scorers)
                raise StoreError(f"--scorer: {self.artifact} has no scores of '{self.scorer}'. {hint}")
            scores = table.column(f"reward.{self.scorer}").to_pylist()
        rows = zip(table.select(names).to_pylist(), scores, strict=True)
        return [{**row, "score": math.inf if score is None else score} for row, score in rows]

    def media(self, row: Mapping[str, Any]) -> tuple[str, bytes]:
        """Return the media type and the bytes of a sample's image or clip."""
        view, sample = RunView(self.context), row["sample_id"]
        if row["media_format"] == "mp4":
            films = view.films(self.epoch, [sample], evaluation=self.evaluation)
            if sample in films:
                return "video/mp4", films[sample]
        pixels = view.pictures(self.epoch, [sample], evaluation=self.evaluation)[sample]
        if row["media_format"] == "mp4":
            clips = MediaFormat(name="mp4", lossless=False, fps=self.context.config.rollout.media.fps)
            return "video/mp4", clips.encode(pixels)
        return "image/png", DEFAULT_MEDIA.encode(np.concatenate(list(pixels), axis=1) if pixels.ndim == 4 else pixels)

    def starts(self, sample: str) -> list[np.ndarray]:
        """Return the images that the prompt of a sample starts from, (H, W, 3) uint8 each."""
        return RunView(self.context).references(self.epoch, [sample], evaluation=self.evaluation)[sample]


@dataclass(frozen=True, slots=True, kw_only=True)
class RatedGroup:
    """Two samples of one prompt, or up to six."""

    key: Key
    """Artifact and id of each."""
    prompt_id: str
    prompt: str
    gap: float
    """Largest distance of the scores, 0 without a scorer; infinite if one has no score."""
    draw: str
    """Uniform draw of the group: its place among equal ones."""


def sources_of(
    context: RunContext, against: RunContext | None, epoch: int | None, *, evaluation: bool, scorer: str | None
) -> list[SampleSource]:
    """Return the samples to compare: of one rollout or evaluation with each other, or of two evaluations.

    Args:
        against: another run, whose evaluation is compared with that of ``context``.
        epoch: the epoch; of two runs the last evaluation of each when absent, of one run epoch 0 and the last one.
        evaluation: samples of the evaluation of ``epoch``, not of its rollout.
        scorer: name of the reward whose scores choose pairs.
    """
    if epoch is not None and against is None:
        return [SampleSource(context=context, epoch=epoch, evaluation=evaluation, scorer=scorer)]
    runs = [context, context if against is None else against]
    ends = [finished_evaluations(each.chain) for each in runs]
    for run, entries in zip(runs, ends, strict=True):
        if (not entries and epoch is None) or (against is None and len(entries) < 2):
            raise StoreError(
                f"Run '{run.run.name}' has {len(entries)} evaluations with samples to compare. Train it further, or "
                "compare the samples of one rollout with --epoch N."
            )
    first = epoch if epoch is not None else ends[0][0] if against is None else ends[0][-1]
    last = epoch if epoch is not None else ends[1][-1]
    return [
        SampleSource(context=run, epoch=each, evaluation=True, scorer=scorer)
        for run, each in zip(runs, (first, last), strict=True)
    ]


def groups_of(sources: Sequence[SampleSource], seed: int, size: int = 2) -> list[RatedGroup]:
    """Return groups of at most ``size`` samples of one prompt, pairs by default.

    Of two sources: the samples of the same replica, which have the same noise if the runs have the same seed. Of one:
    neighbors in the order of the scores, or in a drawn order without a scorer; consecutive groups share a sample. These
    are the closest pairs, connect all samples of a prompt, and their number is linear in that of the samples. Equal
    texts count once.
    """
    groups, first, other = [], sources[0], sources[-1]
    for named in _within(first, seed, size) if len(sources) == 1 else _between(first, other, size):
        key = tuple(sorted(sample for sample, _ in named))
        scores, row = [each["score"] for _, each in named], named[0][1]
        gap = max(scores) - min(scores)
        fields = {"prompt_id": row["prompt_id"], "prompt": row["prompt"], "draw": fingerprint([seed, key])}
        groups.append(RatedGroup(key=key, gap=math.inf if math.isnan(gap) else gap, **fields))
    if not groups:
        names = " and ".join(sorted({source.artifact for source in sources}))
        raise StoreError(f"No prompt has two samples to compare in {names}. Compare other epochs or runs.")
    return groups


_Named = tuple[tuple[str, str], Mapping[str, Any]]


def _within(source: SampleSource, seed: int, size: int) -> Iterator[list[_Named]]:
    groups: dict[str, dict[str, _Named]] = {}
    for row in source.rows:
        content = row["sample_id"] if row["media_format"] else row["text"]
        groups.setdefault(row["prompt_id"], {}).setdefault(content, ((source.artifact, row["sample_id"]), row))
    for members in groups.values():
        order = sorted(members.values(), key=lambda each: (each[1]["score"], fingerprint([seed, each[0][1]])))
        yield from (order[start : start + size] for start in range(0, len(order) - 1, size - 1))


def _between(source: SampleSource, other: SampleSource, size: int) -> Iterator[list[_Named]]:
    if source.artifact == other.artifact:
        raise StoreError(f"Both sides have the same samples, {source.artifact}: they share the artifact.")
    others = {(row["prompt_id"], row["replica"]): row for row in other.rows}
    groups: dict[str, list[_Named]] = {}
    for row in source.rows:
        pair = others.get((row["prompt_id"], row["replica"]))
        same = pair is not None and not row["media_format"] and row["text"] == pair["text"]
        if pair is not None and not same:
            both = ((source.artifact, row["sample_id"]), row), ((other.artifact, pair["sample_id"]), pair)
            groups.setdefault(row["prompt_id"], []).extend(both)
    step = 2 * (size // 2)
    for members in groups.values():
        yield from (members[start : start + step] for start in range(0, len(members), step))


def next_group(groups: Iterable[RatedGroup], answered: Collection[Key]) -> RatedGroup | None:
    """Return the group to show next, None if all are answered.

    Prompts without an answer come first, then the closest scores, then the prompts with the fewest answers, then the
    draw: a function of the groups and the answers only.
    """
    counts = Counter(group.prompt_id for group in groups if group.key in answered)
    left = (group for group in groups if group.key not in answered)
    return min(
        left, key=lambda each: (counts[each.prompt_id] > 0, each.gap, counts[each.prompt_id], each.draw), default=None
    )


def order_of(group: RatedGroup, rater: str) -> Key:
    """Return the samples of a group in the order that a rater sees, a fair draw by seed, group and rater."""
    return tuple(sorted(group.key, key=lambda sample: fingerprint([group.draw, rater, *sample])))
