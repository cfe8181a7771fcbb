"""Verifiers of reasoning-gym: what is asked of the package, which is not installed here, and what it is given."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from flowmill.configs.errors import ConfigError
from flowmill.models.rewards.factory import check_reward, make_reward
from flowmill.models.rewards.reasoning import ReasoningGym
from tests.conftest import ROOT

ROWS = [json.loads(line) for line in (ROOT / "configs/prompts/reasoning-heldout.jsonl").read_text().splitlines()]
TRAIN = [json.loads(line) for line in (ROOT / "configs/prompts/reasoning-train.jsonl").read_text().splitlines()]


def test_the_package_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowmill.configs.extras.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"flowmill\[reasoning\]"):
        make_reward("reasoning_gym", {}, device=None)


def test_a_pattern_without_a_group_is_refused() -> None:
    for check in (make_reward, check_reward):
        with pytest.raises(ConfigError, match="pattern is 'answer'; it has no group; put the result in parentheses"):
            check("reasoning_gym", {"pattern": "answer"})


def test_the_verifier_of_the_task_gets_the_last_answer_and_the_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def verifier(name: str) -> Any:
        def score(answer: str, entry: dict[str, Any]) -> float:
            asked.append((name, answer, entry))
            return 0.01 + 0.99 * (answer == entry["answer"])

        return score

    monkeypatch.setattr("flowmill.models.rewards.reasoning.require_extra", lambda *_, **__: None)
    monkeypatch.setitem(sys.modules, "reasoning_gym", SimpleNamespace(get_score_answer_fn=verifier))
    texts = ["<answer>1</answer> no, <answer> 4\n</answer>", "<answer>5</answer>", "4", ""]
    about = {"dataset": "chain_sum", "answer": "4", "entry": '{"num_terms": 2}'}
    scores = ReasoningGym().score(texts, ["2 + 2 ="] * 4, [about] * 4)
    assert scores.values.tolist() == pytest.approx([1.0, 0.01, 0.0, 0.0])
    assert asked[0] == ("chain_sum", "4", {"question": "2 + 2 =", "answer": "4", "metadata": {"num_terms": 2}})
    assert len(asked) == 2


def test_prompts_that_are_held_out_are_held_out() -> None:
    assert len({row["dataset"] for row in TRAIN}) == len({row["dataset"] for row in ROWS}) == 5
    assert not {row["prompt"] for row in TRAIN} & {row["prompt"] for row in ROWS}


def test_right_answers_pass_their_own_verifiers() -> None:
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    texts = [f"<answer>{row['answer']}</answer>" for row in ROWS]
    assert ReasoningGym().score(texts, [row["prompt"] for row in ROWS], ROWS).values.tolist() == [1.0] * len(ROWS)
