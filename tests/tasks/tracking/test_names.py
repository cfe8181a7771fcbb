"""Names that a person chooses reach MLflow whatever they are, and plain ones as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from mlflow.utils import validation

from flowmill.tasks.tracking.names import RULES, mlflow_name, mlflow_text

PLAIN = ["flowmill", "eval/heldout/digits_mean", "my_reward:Redness", "a b", "rollout.steps"]
AWKWARD = [
    *("a#b", "a?b%c", "../up", "/root", "a//b", "a/../b", ".", "..", "", " ", "it's", 'a"b', "a\\b", "a\nb", "a\x7fb"),
    *("über/ä", "日本", "[x]", "a+b", "x" * 600, "ä" * 600, "a/" * 300, "x" * 249 + "/", "x/" + "." * 600),
]
CHECKS: dict[str, Callable[[str], Any]] = {
    "metric": lambda name: validation._validate_metric(name, 0.5, 0, 0),
    "param": lambda name: validation._validate_param(name, "value"),
    "tag": lambda name: validation._validate_tag(name, "value"),
    "experiment": validation._validate_experiment_name,
    "logged model": validation._validate_logged_model_name,
    "registered model": validation._validate_model_name,
}


@pytest.mark.parametrize("kind", RULES)
def test_mlflow_takes_every_name(kind: str) -> None:
    rule = RULES[kind]
    for name in (*PLAIN, *AWKWARD):
        taken = mlflow_name(kind, name)
        assert 0 < len(taken) <= rule.limit
        assert not rule.refused.search(taken)
        assert mlflow_name(kind, taken) == taken, "shortened once, it stays"
        if kind in CHECKS:
            CHECKS[kind](taken)
        if rule.is_path:
            assert not validation.path_not_unique(taken)


@pytest.mark.parametrize("kind", RULES)
def test_two_names_never_become_one(kind: str) -> None:
    names = (*PLAIN, *AWKWARD, "x" * 600 + "y", "x" * 600 + "z", "a b#", "a b?")
    assert len({mlflow_name(kind, name) for name in names}) == len(set(names))


@pytest.mark.parametrize("kind", ["metric", "param", "tag", "run", "experiment", "dataset"])
def test_plain_names_stay_as_they_are(kind: str) -> None:
    assert [mlflow_name(kind, name) for name in PLAIN] == PLAIN
    assert mlflow_name("folder", "eval/heldout") == "eval/heldout"
    assert mlflow_name("entry", "120:drawbench") == "120:drawbench"


def test_a_shortened_name_says_what_it_was_and_ends_with_a_digest() -> None:
    assert mlflow_name("folder", "a#b") == "a-b-" + mlflow_name("folder", "a#b")[-8:]
    assert mlflow_name("metric", "x" * 251).startswith("x" * 241 + "-")


def test_long_texts_are_cut() -> None:
    assert mlflow_text("short") == "short"
    assert len(mlflow_text("x" * 9000)) == 5000
