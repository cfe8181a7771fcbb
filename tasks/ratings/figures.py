"""Figures of answers: win rates, agreement of raters, and what is known of each rater.

Legend: P prompts, K pairs, N raters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, median

import numpy as np

from configs.escaping import quoted
from storage.artifacts.lineage import LineageEntry, list_runs, readable_entries
from tasks.algorithms.resampling import Estimate, mean_with_interval
from tasks.inputs.prompts import SOURCE
from tasks.ratings.answers import Answer, Key, answers_of
from tasks.reports.reading import samples_of_epoch, samples_of_evaluation
from tasks.runs.context import RunContext

#: Answers on one side that make a warning: a fair rater gives so many in fewer than 1 of 100 cases.
_ONE_SIDED = 8
_ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class WinRate:
    """The share of answers that one kind of sample wins against another, ties half."""

    winner: str
    """The kind whose share it is."""
    loser: str
    """The kind it is compared with."""
    source: str
    """Source of the prompts."""
    prompts: int
    """Number of prompts."""
    answers: int
    """Number of answers."""
    rate: Estimate
    """Mean over prompts of the share of each, with its interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RaterFigures:
    """The answers of one rater."""

    rater: str
    """Name."""
    answers: int
    """Number of answers, without skipped pairs."""
    ties: int
    """Answers without a preference."""
    skipped: int
    """Skipped pairs."""
    left: float | None
    """Share of the preferences that are for the left sample; None without preferences."""
    seconds: float
    """Median time of an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Agreement of raters on the pairs that all of them answered."""

    raters: Sequence[str]
    """Names."""
    pairs: int
    """Number of these pairs."""
    share: float
    """Share of equal answers, over pairs and pairs of raters."""
    kappa: float | None
    """Agreement beyond chance: Cohen's kappa of two raters, Fleiss' of more; None if chance explains all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RatingReport:
    """All figures of a run's answers."""

    wins: Sequence[WinRate]
    """Win rates between rollouts or evaluations, and of the samples with the higher score of each reward."""
    raters: Sequence[RaterFigures]
    """Each rater."""
    agreement: Sequence[Agreement]
    """Each two raters with common pairs, and all of them if they are more."""
    warnings: Sequence[str]
    """Reasons to distrust a rater."""


def rating_report(context: RunContext) -> RatingReport:
    """Return the figures of a run's answers.

    Raises:
        CorruptError: a record or a table is damaged.
    """
    answers = list(answers_of(context.run).values())
    given = [answer for answer in answers if answer.preferred is not None]
    artifacts = {artifact for answer in given for artifact, _ in answer.key}
    places = _places(context, artifacts)
    labels = {artifact: _label(place, context.run.name) for artifact, place in places.items()}
    labels |= {artifact: artifact for artifact in sorted(artifacts - {*places})}
    sources = {prompt: about.metadata.get(SOURCE, _ALL) for prompt, about in context.prompts_by_id.items()}
    found = _raters(answers)
    return RatingReport(
        wins=[*_between(given, labels, sources), *_by_score(given, _scores(context, places), sources)],
        raters=found,
        agreement=agreements(given),
        warnings=[text for each in found for text in _warnings(each)],
    )


def agreements(answers: Iterable[Answer]) -> list[Agreement]:
    """Return the agreement of each two raters with common pairs, and of all raters if they are more than two."""
    given: dict[str, dict[Key, float]] = {}
    for each in answers:
        given.setdefault(each.rater, {})[each.key] = _preferred(each, each.key[0])
    names = sorted(given)
    groups = [*combinations(names, 2), *([tuple(names)] if len(names) > 2 else [])]
    return [found for group in groups if (found := _agreement(group, [given[name] for name in group])) is not None]


def _agreement(names: Sequence[str], given: Sequence[Mapping[Key, float]]) -> Agreement | None:
    common = sorted(set.intersection(*(set(each) for each in given)))
    if not common:
        return None
    votes = np.array([[each[key] for each in given] for key in common])
    share, chance = agreement_of(votes)
    kappa = None if chance == 1 else (share - chance) / (1 - chance)
    return Agreement(raters=names, pairs=len(common), share=share, kappa=kappa)


def agreement_of(votes: np.ndarray) -> tuple[float, float]:
    """Return the observed share of equal answers of (K, N) answers, and the share expected by chance.

    Expected by chance: for two raters from the frequencies of each (Cohen 1960), for more from the frequencies of all
    (Fleiss 1971, where the observed share is the mean over pairs of raters). kappa = (observed - expected) /
    (1 - expected).
    """
    counts = np.stack([(votes == value) for value in np.unique(votes)], axis=-1).astype(np.float64)
    raters = votes.shape[1]
    of_pair = counts.sum(1)
    observed = float((of_pair * (of_pair - 1)).sum(1).mean() / (raters * (raters - 1)))
    shares = counts.mean(0)
    expected = shares.prod(0) if raters == 2 else shares.mean(0) ** 2
    return observed, float(expected.sum())


def _preferred(answer: Answer, sample: tuple[str, str]) -> float:
    """Return 1 if an answer prefers a sample of its pair, 0 if it prefers the other one, 0.5 for neither."""
    first = float(answer.preferred or 0.0)
    return first if sample == (answer.first_artifact, answer.first_sample) else 1 - first


def _between(answers: Iterable[Answer], labels: Mapping[str, str], sources: Mapping[str, str]) -> Iterator[WinRate]:
    """Yield the win rates of artifacts over those listed before them."""
    order = list(labels)
    shares: dict[tuple[str, str], list[tuple[str, float]]] = {}
    for answer in answers:
        loser, winner = sorted(answer.key, key=lambda each: order.index(each[0]))
        if loser[0] != winner[0]:
            names = labels[winner[0]], labels[loser[0]]
            shares.setdefault(names, []).append((answer.prompt_id, _preferred(answer, winner)))
    for names, each in shares.items():
        yield from win_rates(*names, each, sources)


_Scores = Mapping[str, Mapping[tuple[str, str], float]]


def _by_score(answers: Collection[Answer], scores: _Scores, sources: Mapping[str, str]) -> Iterator[WinRate]:
    """Yield how often the sample with the higher score of each reward wins."""
    for name, of in scores.items():
        shares = []
        for answer in answers:
            known = [(of[each], each) for each in answer.key if each in of]
            if len(known) == 2 and known[0][0] != known[1][0]:
                shares.append((answer.prompt_id, _preferred(answer, max(known)[1])))
        if shares:
            yield from win_rates(f"higher '{name}'", f"lower '{name}'", shares, sources)


def win_rates(
    winner: str, loser: str, shares: Collection[tuple[str, float]], sources: Mapping[str, str]
) -> Iterator[WinRate]:
    """Yield the win rate over all prompts, and over those of each source if there are several.

    A prompt counts with the mean of its answers: pairs of one prompt are not independent.
    """
    names = sorted({sources.get(prompt, _ALL) for prompt, _ in shares})
    for source in [_ALL, *(names if len(names) > 1 else ())]:
        prompts: dict[str, list[float]] = {}
        for prompt, share in shares:
            if source in (_ALL, sources.get(prompt, _ALL)):
                prompts.setdefault(prompt, []).append(share)
        yield WinRate(
            winner=winner,
            loser=loser,
            source=source,
            prompts=len(prompts),
            answers=sum(map(len, prompts.values())),
            rate=mean_with_interval(np.array([fmean(each) for each in prompts.values()]), bounds=(0, 1)),
        )


def _raters(answers: Sequence[Answer]) -> list[RaterFigures]:
    found = []
    for rater in sorted({answer.rater for answer in answers}):
        own = [answer for answer in answers if answer.rater == rater]
        values = Counter(answer.preferred for answer in own)
        decided = values[1.0] + values[0.0]
        found.append(
            RaterFigures(
                rater=rater,
                answers=len(own) - values[None],
                ties=values[0.5],
                skipped=values[None],
                left=values[1.0] / decided if decided else None,
                seconds=median(answer.seconds for answer in own),
            )
        )
    return found


def _warnings(rater: RaterFigures) -> Iterator[str]:
    decided = rater.answers - rater.ties
    if decided >= _ONE_SIDED and rater.left in (0.0, 1.0):
        side = "left" if rater.left else "right"
        yield (
            f"{quoted(rater.rater)} preferred the {side} sample in all {decided} answers. Sides are drawn by chance, "
            "so these answers are not about the samples."
        )


def _places(context: RunContext, artifacts: Collection[str]) -> dict[str, tuple[str, LineageEntry]]:
    """Return the run and the record of each artifact: evaluations of this run by epoch, its rollouts, other runs."""
    store, own = context.store, context.run.name
    names = [own, *(name for name in list_runs(store) if name != own)]
    named = [(name, entry) for name in names for entry in readable_entries(store, name) if entry.artifact in artifacts]
    named.sort(key=lambda each: (each[0] != own, each[0], each[1].stage, each[1].epoch))
    found: dict[str, tuple[str, LineageEntry]] = {}
    for name, entry in named:
        found.setdefault(entry.artifact, (name, entry))
    return found


def _label(place: tuple[str, LineageEntry], own: str) -> str:
    run, entry = place
    kind = "evaluation" if entry.stage == "evaluate" else entry.stage
    return f"{'' if run == own else f'{run}, '}{kind} of epoch {entry.epoch}"


def _scores(context: RunContext, places: Mapping[str, tuple[str, LineageEntry]]) -> _Scores:
    """Return the scores of the run's own samples by reward."""
    chain, found = context.chain, dict[str, dict[tuple[str, str], float]]()
    for artifact, (_, entry) in places.items():
        current = chain.find(entry.epoch, entry.stage)
        if current is None or current.artifact != artifact:
            continue
        table = (samples_of_evaluation if entry.stage == "evaluate" else samples_of_epoch)(chain, entry.epoch)
        samples = table.column("sample_id").to_pylist()
        for column in table.column_names:
            if column.startswith("reward."):
                values = zip(samples, table.column(column).to_pylist(), strict=True)
                scores = {(artifact, sample): value for sample, value in values if value is not None}
                found.setdefault(column.removeprefix("reward."), {}).update(scores)
    return found
