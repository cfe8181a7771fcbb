"""Intervals of means over prompts."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from flowmill.configs.load import load_config
from flowmill.tasks.algorithms import resampling
from flowmill.tasks.algorithms.resampling import FEWEST, mean_with_interval
from flowmill.tasks.metrics.evaluations import weighted_bounds
from flowmill.tasks.reports.report.headline import SampleScores, headline


def test_the_interval_is_that_of_the_mean() -> None:
    draw = np.random.default_rng(0)
    hits = 0
    for number in range(200):
        values = draw.normal(1.0, 2.0, 60)
        found = mean_with_interval(values, seed=number)
        assert found.mean == pytest.approx(values.mean())
        hits += found.low <= 1.0 <= found.high
    assert 0.90 <= hits / 200 <= 0.985, "95 % intervals hold the mean 95 % of the time"
    values = draw.normal(0.0, 1.0, 500)
    found = mean_with_interval(values)
    assert found.high - found.low == pytest.approx(2 * 1.96 * values.std() / 500**0.5, rel=0.05)
    constant = mean_with_interval(np.full(FEWEST, 0.5))
    assert constant.low == constant.high == 0.5
    few = mean_with_interval(np.arange(FEWEST - 1.0))
    assert few.mean == (FEWEST - 2) / 2
    assert few.low is few.high is None


#: Name, how many draws are made, and their mean: even, leaning, shares of four images, all or nothing, differences.
DRAWS: dict[str, tuple[Callable[[np.random.Generator, int], np.ndarray], float]] = {
    "even": (lambda draw, n: draw.normal(0.0, 1.0, n), 0.0),
    "leaning": (lambda draw, n: draw.exponential(1.0, n), 1.0),
    "of four": (lambda draw, n: draw.binomial(4, 0.9, n) / 4, 0.9),
    "all or nothing": (lambda draw, n: draw.binomial(1, 0.9, n).astype(float), 0.9),
    "differences": (lambda draw, n: draw.choice([-1.0, 0.0, 1.0], n, p=[0.1, 0.5, 0.4]), 0.3),
}


@pytest.mark.parametrize("count", [20, 40])
@pytest.mark.parametrize("name", DRAWS)
def test_intervals_hold_with_few_prompts(monkeypatch: pytest.MonkeyPatch, name: str, count: int) -> None:
    monkeypatch.setattr(resampling, "_RESAMPLES", 1000)
    make, mean = DRAWS[name]
    draw = np.random.default_rng(1)
    found = [mean_with_interval(make(draw, count), seed=number) for number in range(1000)]
    held = sum(each.low is not None and each.high is not None and each.low <= mean <= each.high for each in found)
    assert held / 1000 >= 0.93, "95 %, less two standard errors of a thousand tries and what is discrete"


@pytest.mark.parametrize("bounds", [(0.0, 1.0), (1.0, 5.0), (-1.0, 1.0)])
def test_intervals_stay_within_the_bounds_of_a_score_and_hold(
    monkeypatch: pytest.MonkeyPatch, bounds: tuple[float, float]
) -> None:
    """Scores near a bound, where t and the bootstrap reach beyond it."""
    monkeypatch.setattr(resampling, "_RESAMPLES", 1000)
    low, high = bounds
    draw, held, beyond = np.random.default_rng(2), 0, 0
    for number in range(300):
        values = low + (high - low) * draw.binomial(4, 0.97, 20) / 4
        found = mean_with_interval(values, bounds=bounds, seed=number)
        assert found.low is not None
        assert found.high is not None
        assert low <= found.low < found.high <= high
        held += found.low <= low + 0.97 * (high - low) <= found.high
        plain = mean_with_interval(values, seed=number)
        beyond += plain.high is not None and plain.high > high
    assert held / 300 >= 0.93
    assert beyond > 0
    # All equal: what could still be seen is not nothing.
    same = mean_with_interval(np.full(20, high), bounds=bounds)
    assert same.high == high
    assert same.low == pytest.approx(high - (high - low) * 0.1611, abs=1e-3 * (high - low))
    # A score beyond them shows that they are none.
    values = np.linspace(low, high + 1, FEWEST)
    assert mean_with_interval(values, bounds=bounds) == mean_with_interval(values)


def test_wilsons_interval_is_the_published_one() -> None:
    values = np.array([1.0] * 81 + [0.0] * 182)
    found = mean_with_interval(values)
    # Newcombe 1998, table I: 81 of 263.
    assert (found.low, found.high) == (pytest.approx(0.2553, abs=1e-4), pytest.approx(0.3662, abs=1e-4))


Draw = Callable[[np.random.Generator, int], np.ndarray]
#: Accuracies of prompts of a worthless reward: a coin per prompt, with 1, 4 and 20 judgments, and no coin.
WORTHLESS: dict[str, Draw] = {
    "all or none": lambda draw, n: draw.binomial(1, 0.5, n).astype(float),
    "mostly": lambda draw, n: draw.binomial(20, np.where(draw.random(n) < 0.5, 0.1, 0.9)) / 20,
    "four": lambda draw, n: draw.binomial(4, 0.5, n) / 4,
    "any": lambda draw, n: draw.random(n),
}


@pytest.mark.parametrize("count", [FEWEST, 6, 8, 12, 19])
@pytest.mark.parametrize("name", WORTHLESS)
def test_few_prompts_rarely_prove_a_worthless_reward(monkeypatch: pytest.MonkeyPatch, name: str, count: int) -> None:
    monkeypatch.setattr(resampling, "_RESAMPLES", 500)
    draw = np.random.default_rng(count)
    found = [mean_with_interval(WORTHLESS[name](draw, count), bounds=(0, 1), seed=n) for n in range(400)]
    passed = sum(each.low is not None and each.low > 0.5 for each in found)
    assert passed / 400 <= 0.06, "2.5 % at one side, and three and a half standard errors"


def test_fewer_prompts_have_no_interval() -> None:
    found = mean_with_interval(np.ones(FEWEST - 1), bounds=(0, 1))
    assert (found.mean, found.low, found.high) == (1.0, None, None)


@pytest.mark.parametrize("count", [5, 7, 20, 33])
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_no_end_leaves_the_scale_by_rounding(count: int, value: float) -> None:
    found = mean_with_interval(np.full(count, value), bounds=(0, 1))
    assert found.low is not None
    assert found.high is not None
    assert 0.0 <= found.low <= found.high <= 1.0


def test_a_bound_on_one_side_cuts_that_side() -> None:
    values = np.array([0.1, 0.9, 1.0, 1.0, 1.0, 1.0])
    free, cut = mean_with_interval(values), mean_with_interval(values, bounds=(-math.inf, 1.0))
    assert free.high is not None
    assert free.high > 1.0
    assert (cut.low, cut.high) == (free.low, 1.0)


def test_the_headline_stays_within_the_scale_that_rewards_declare() -> None:
    scores = [0.0, 0.2, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]

    def of(values: list[float]) -> list[SampleScores]:
        about = {"split": "heldout", "verdict": ""}
        return [SampleScores(sample_id=str(n), prompt_id=str(n), reward=each, **about) for n, each in enumerate(values)]

    config = load_config("digits", ["rewards.0.weight=2"])
    assert weighted_bounds(config) == (0.0, 2.0)
    mean = 2 * float(np.mean(scores))
    before, after = of([0.0] * 8), of([2 * score for score in scores])
    found = headline({"heldout": 0.0}, {"heldout": mean}, before, after, weighted_bounds(config))
    assert found is not None
    assert (found.after.high, found.change.high) == (2.0, 2.0)
    free = headline({"heldout": 0.0}, {"heldout": mean}, before, after, (-math.inf, math.inf))
    assert free is not None
    assert free.after.high is not None
    assert free.after.high > 2.0


def test_bounds_are_of_all_rewards_or_of_none() -> None:
    opposed = load_config("digits", ["rewards=[{name: digits}, {name: exposure, weight: -3}]"])
    assert weighted_bounds(opposed) == (-3.0, 1.0)
    custom = load_config("digits", ["rewards=[{name: digits}, {name: 'nowhere:Mine'}]"])
    assert weighted_bounds(custom) == (-math.inf, math.inf)
