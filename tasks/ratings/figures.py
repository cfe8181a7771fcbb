"""Figures of answers as rows for people: win rates, agreement of raters, and the habits of each rater.

Legend: K pairs, N raters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import combinations
from statistics import fmean, median
from typing import Any

import numpy as np

from flowmill.configs.errors import StoreError
from flowmill.storage.artifacts.lineage import LineageEntry, readable_entries
from flowmill.tasks.algorithms.resampling import mean_with_interval
from flowmill.tasks.inputs.prompts import SOURCE
from flowmill.tasks.metrics.view import RunView
from flowmill.tasks.ratings.answers import Key, RatingAnswer, answers_of, comparisons_of, no_answers
from flowmill.tasks.runs.context import RunContext

#: Preferences on one side only that make a warning: a fair rater gives so many in fewer than 1 of 100 cases.
_ONE_SIDED = 8
_ALL = "all"
Row = dict[str, Any]


def rating_report(context: RunContext, question: str = "") -> dict[str, list[Row]]:
    """Return the figures of a run's answers to a question; stars and ranks count as comparisons of each two samples.

    Returns:
        'wins': win rates between rollouts or evaluations, and of the samples with the higher score of each reward, see
        ``win_rates``. 'raters': of each rater the numbers of answers, ties and skipped pairs, the share of preferences
        for the left sample, the median seconds, and a warning if all are on one side. 'agreement': see ``agreements``.
    """
    answers = list(answers_of(context.run, question).values())
    if not answers:
        raise StoreError(no_answers(context.run, question))
    preferences = comparisons_of(answers)
    places = _places(context, {artifact for answer in preferences for artifact, _ in answer.key})
    sources = {prompt: record.metadata.get(SOURCE, _ALL) for prompt, record in context.prompts_by_id.items()}
    compared = {**_between(preferences, [*places]), **_by_score(preferences, _scores(context, places))}
    labels = {artifact: _label(place, context.run.name) for artifact, place in places.items()}
    wins = [
        row
        for (winner, loser), shares in compared.items()
        for row in win_rates(labels.get(winner, winner), labels.get(loser, loser), shares, sources)
    ]
    raters = [
        _rater(name, [answer for answer in answers if answer.rater == name])
        for name in sorted({answer.rater for answer in answers})
    ]
    return {"wins": wins, "raters": raters, "agreement": agreements(preferences)}


#: (winner, loser) -> for each answer the prompt and the share of the winner: 1, 0, or 0.5 for a tie.
_Shares = dict[tuple[str, str], list[tuple[str, float]]]


def win_rates(
    winner: str, loser: str, shares: Collection[tuple[str, float]], sources: Mapping[str, str]
) -> Iterator[Row]:
    """Yield the win rate over all prompts, and over those of each source if there are several.

    A prompt counts with the mean of its answers, as these are not independent. The interval (low, high) is that of
    ``mean_with_interval`` over prompts, None with too few of them.

    Args:
        winner: the samples whose share it is.
        loser: the samples they are compared with.
        shares: prompt id and share of the winner for each answer.
        sources: source of each prompt.
    """
    names = sorted({sources.get(prompt, _ALL) for prompt, _ in shares})
    for source in [_ALL, *(names if len(names) > 1 else ())]:
        prompts: dict[str, list[float]] = {}
        for prompt, share in shares:
            if source in (_ALL, sources.get(prompt, _ALL)):
                prompts.setdefault(prompt, []).append(share)
        rate = mean_with_interval(np.array([fmean(each) for each in prompts.values()]), bounds=(0, 1))
        counts = {"prompts": len(prompts), "answers": sum(map(len, prompts.values()))}
        yield {
            "winner": winner,
            "loser": loser,
            "source": source,
            **counts,
            "rate": rate.mean,
            "low": rate.low,
            "high": rate.high,
        }


def rate_text(row: Row) -> str:
    """Return a win rate with its interval as text."""
    return f"{row['rate']:.3f}" + ("" if row["low"] is None else f" ({row['low']:.3f} to {row['high']:.3f})")


def agreements(answers: Iterable[RatingAnswer]) -> list[Row]:
    """Return the agreement of each two raters with common pairs, and of all raters if they are more than two.

    'share' is that of equal answers over pairs and pairs of raters; 'kappa' the agreement beyond chance, None if chance
    explains all.
    """
    shares: dict[str, dict[Key, float]] = {}
    for each in answers:
        shares.setdefault(each.rater, {})[each.key] = _preferred(each, each.key[0])
    names, rows = sorted(shares), list[Row]()
    for group in [*combinations(names, 2), *([tuple(names)] if len(names) > 2 else [])]:
        common = sorted(set.intersection(*(set(shares[name]) for name in group)))
        if common:
            share, chance = agreement_of(np.array([[shares[name][key] for name in group] for key in common]))
            kappa = None if chance == 1 else (share - chance) / (1 - chance)
            rows.append({"raters": ", ".join(group), "pairs": len(common), "share": share, "kappa": kappa})
    return rows


def disputed(answers: Iterable[RatingAnswer]) -> list[list[RatingAnswer]]:
    """Return the comparisons of each pair of which raters prefer either sample, the most divided pairs first."""
    by_pair: dict[Key, list[RatingAnswer]] = {}
    for each in answers:
        by_pair.setdefault(each.key, []).append(each)
    votes = {key: [_preferred(each, key[0]) for each in rows] for key, rows in by_pair.items()}
    split = [key for key, values in votes.items() if {0.0, 1.0} <= {*values}]
    return [by_pair[key] for key in sorted(split, key=lambda key: (abs(fmean(votes[key]) - 0.5), -len(votes[key])))]


def agreement_of(votes: np.ndarray) -> tuple[float, float]:
    """Return the observed share of equal answers of (K, N) answers, and the share expected by chance.

    Expected by chance: for two raters from the frequencies of each (Cohen 1960), for more from the frequencies of all
    (Fleiss 1971, where the observed share is the mean over pairs of raters). kappa = (observed - expected) /
    (1 - expected).
    """
    counts = np.stack([votes == value for value in np.unique(votes)], axis=-1).astype(np.float64)
    raters, of_pair, shares = votes.shape[1], counts.sum(1), counts.mean(0)
    observed = (of_pair * (of_pair - 1)).sum(1).mean() / (raters * (raters - 1))
    expected = shares.prod(0) if raters == 2 else shares.mean(0) ** 2
    return float(observed), float(expected.sum())


def _preferred(answer: RatingAnswer, sample: tuple[str, str]) -> float:
    """Return 1 if an answer prefers a sample of its pair, 0 if it prefers the other one, 0.5 for neither."""
    first = float(answer.preferred or 0.0)
    return first if sample == (answer.first_artifact, answer.first_sample) else 1 - first


def _between(answers: Iterable[RatingAnswer], order: list[str]) -> _Shares:
    """Return the shares of artifacts against those that stand before them."""
    shares: _Shares = {}
    for answer in answers:
        loser, winner = sorted(answer.key, key=lambda each: order.index(each[0]))
        if loser[0] != winner[0]:
            share = answer.prompt_id, _preferred(answer, winner)
            shares.setdefault((winner[0], loser[0]), []).append(share)
    return shares


def _by_score(answers: Iterable[RatingAnswer], scores: Mapping[str, Mapping[tuple[str, str], float]]) -> _Shares:
    """Return the shares of the samples with the higher score of each reward."""
    shares: _Shares = {}
    for answer in answers:
        for name, of in scores.items():
            low, high = sorted(answer.key, key=lambda each: of.get(each, np.nan))
            if of.get(low, np.nan) < of.get(high, np.nan):
                share = answer.prompt_id, _preferred(answer, high)
                shares.setdefault((f"higher '{name}'", f"lower '{name}'"), []).append(share)
    return shares


def _rater(name: str, answers: Collection[RatingAnswer]) -> Row:
    values = Counter(answer.preferred for answer in answers)
    decided = values[1.0] + values[0.0]
    opinions = [answer for answer in answers if not answer.skipped]
    # Ties, and the same stars for all samples, may well repeat.
    habits = Counter(
        f"order {', '.join(map(str, answer.values))}"
        if answer.values
        else "left one"
        if answer.preferred
        else "right one"
        for answer in opinions
        if answer.preferred != 0.5 and len({*answer.values}) != 1
    )
    one_sided = len(habits) == 1 and habits.total() >= _ONE_SIDED
    return {
        "rater": name,
        "answers": len(opinions),
        "ties": values[0.5],
        "both_bad": sum(answer.both_bad for answer in answers),
        "skipped": len(answers) - len(opinions),
        "left": values[1.0] / decided if decided else None,
        "seconds": median(answer.seconds for answer in answers),
        "warning": f"always the {next(iter(habits))}, though sides are drawn: not about the samples"
        if one_sided
        else None,
    }


_Places = dict[str, tuple[str, LineageEntry | None]]


def _places(context: RunContext, artifacts: Collection[str]) -> _Places:
    """Return run and record of each artifact: evaluations of this run by epoch, its rollouts, those of other runs."""
    store, own = context.store, context.run.name
    named = sorted(readable_entries(store), key=lambda each: (each[0] != own, each[0], each[1].stage, each[1].epoch))
    places: _Places = {}
    for run, entry in named:
        if entry.artifact in artifacts:
            places.setdefault(entry.artifact, (run, entry))
    return places | {artifact: ("", None) for artifact in sorted(artifacts) if artifact not in places}


def _label(place: tuple[str, LineageEntry | None], own: str) -> str:
    run, entry = place
    if entry is None:
        return "samples that no run names any more"
    kind = "evaluation" if entry.stage == "evaluate" else entry.stage
    return f"{'' if run == own else f'{run}, '}{kind} of epoch {entry.epoch}"


def _scores(context: RunContext, places: _Places) -> dict[str, dict[tuple[str, str], float]]:
    chain, by_reward = context.chain, dict[str, dict[tuple[str, str], float]]()
    for artifact, (_, entry) in places.items():
        current = entry and chain.find(entry.epoch, entry.stage)
        if entry is None or current is None or current.artifact != artifact:
            continue
        table = RunView(context).samples(entry.epoch, evaluation=entry.stage == "evaluate")
        samples = [(artifact, sample) for sample in table.column("sample_id").to_pylist()]
        for column in table.column_names:
            if column.startswith("reward."):
                values = zip(samples, table.column(column).to_pylist(), strict=True)
                scores = {sample: value for sample, value in values if value is not None}
                by_reward.setdefault(column.removeprefix("reward."), {}).update(scores)
    return by_reward
