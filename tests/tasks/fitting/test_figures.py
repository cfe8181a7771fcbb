"""Accuracies of fitted rewards: over prompts, and of samples of one prompt."""

from __future__ import annotations

import numpy as np
import pytest

from flowmill.configs.errors import ConfigError
from flowmill.models.rewards.fitted import may_be_chance
from flowmill.tasks.algorithms.resampling import FEWEST
from flowmill.tasks.export.provenance import accuracy_text
from flowmill.tasks.fitting.figures import figures_of_preferences, figures_of_ratings
from flowmill.tasks.fitting.judgments import Judgment


def judgment(prompt: str, value: float, *items: str) -> Judgment:
    return Judgment(prompt=prompt, items=items, value=value, rater="", source="", where="")


def ratings(prompts: int, each: int, value: np.ndarray, *, named: bool = True) -> list[Judgment]:
    """Return ratings of ``each`` samples of every prompt."""
    return [
        judgment(f"scene {p}" if named else "", float(value[p * each + k]), f"{p}-{k}")
        for p in range(prompts)
        for k in range(each)
    ]


def test_judgments_of_a_prompt_count_once() -> None:
    """A coin per prompt: twenty judgments of each of eight prompts are eight units, not 160."""
    right = [1, 1, 1, 1, 1, 1, 0, 0]
    rows = [judgment(f"p{p}", 1.0, f"{p}-{k}a", f"{p}-{k}b") for p in range(8) for k in range(20)]
    difference = np.repeat([1.0 if each else -1.0 for each in right], 20)
    found = figures_of_preferences(rows, difference, np.full(160, 0.6))["accuracy"]
    assert (found["mean"], found["count"], found["unit"]) == (0.75, 8, "prompts")
    assert found["low"] < 0.5 < found["high"]
    assert may_be_chance(found)


@pytest.mark.parametrize("prompts", [1, FEWEST - 1])
def test_too_few_prompts_have_no_interval_however_many_judgments(prompts: int) -> None:
    rows = [judgment(f"p{p}", 1.0, f"{p}-{k}a", f"{p}-{k}b") for p in range(prompts) for k in range(100)]
    found = figures_of_preferences(rows, np.ones(len(rows)), np.full(len(rows), 0.9))
    assert (found["accuracy"]["low"], found["accuracy"]["count"]) == (None, prompts)
    assert may_be_chance(found["accuracy"])
    assert accuracy_text({"heldout": found}).endswith(f"over {prompts} prompts, of which an interval needs {FEWEST}")


def test_without_prompts_judgments_that_share_a_sample_are_one_unit() -> None:
    rows = [judgment("", 1.0, f"{k // 2}", f"other {k}") for k in range(20)]
    found = figures_of_preferences(rows, np.ones(20), np.full(20, 0.9))["accuracy"]
    assert found["count"] == 10
    assert found["low"] > 0.5


def test_scores_that_tell_scenes_apart_alone_are_chance() -> None:
    draw = np.random.default_rng(0)
    scenes = np.repeat(draw.uniform(1, 5, 40), 4)
    rows = ratings(40, 4, np.round(scenes + draw.normal(0, 0.5, 160)))
    found = figures_of_ratings(rows, scenes + draw.normal(0, 1e-3, 160), 0)["accuracy"]
    assert found["unit"] == "prompts"
    assert found["mean"] == pytest.approx(0.5, abs=0.1)
    assert may_be_chance(found)
    telling = figures_of_ratings(rows, np.array([row.value for row in rows]), 0)["accuracy"]
    assert telling["mean"] == 1.0
    assert not may_be_chance(telling)


def test_one_rating_per_prompt_proves_nothing() -> None:
    values = np.tile(np.arange(1, 6), 8)
    found = figures_of_ratings(ratings(40, 1, values), values.astype(float), 0)
    assert found["accuracy"]["mean"] == 1.0
    assert found["accuracy"]["unit"] == "pairs of different prompts"
    assert may_be_chance(found["accuracy"])
    assert accuracy_text({"heldout": found}).endswith("pairs of different prompts")


def test_ratings_without_prompts_are_compared_in_pairs_of_which_none_shares_a_sample() -> None:
    values = np.tile([1, 5], 40)
    found = figures_of_ratings(ratings(80, 1, values, named=False), values.astype(float), 0)["accuracy"]
    assert found["unit"] == "pairs"
    assert found["count"] <= 40
    assert found["low"] > 0.5


def test_all_pairs_of_a_prompt_are_compared_and_equal_scores_are_half_right() -> None:
    """Ratings 1, 2, 2, 3 with scores 1, 1, 3, 2: of five pairs with other ratings 3.5 are right."""
    rows = ratings(1, 4, np.array([1, 2, 2, 3]))
    found = figures_of_ratings(rows, np.array([1.0, 1.0, 3.0, 2.0]), 0)["accuracy"]
    assert found["mean"] == pytest.approx(3.5 / 5)


def test_equal_ratings_measure_nothing() -> None:
    with pytest.raises(ConfigError, match="ties or equal ratings"):
        figures_of_ratings(ratings(10, 4, np.full(40, 3)), np.arange(40.0), 0)
