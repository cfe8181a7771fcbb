"""Return values of rewards: one number per sample in any form; everything else is refused by name."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from flowmill.configs.errors import ConfigError, RewardError
from flowmill.configs.registry import resolve
from flowmill.configs.rewards import RewardSection
from flowmill.configs.schema import RunConfig
from flowmill.models.rewards import REWARDS
from flowmill.models.rewards.base import Batch, Needs, Scores
from flowmill.models.rewards.factory import FunctionReward, make_reward, needs_of
from flowmill.models.rewards.invocation import Handling, declared_needs, score
from flowmill.tasks.specs.plan import RunPlan
from tests.support.language_models import texts_data

TEXTS = np.array(["one", "two"], object)
BATCH = Batch(media=TEXTS, prompts=["a", "b"], metadata=[{}, {}], groups=["g", "g"])


async def later() -> list[float]:
    return [1.0, 2.0]


async def several() -> AsyncIterator[float]:
    yield 1.0


def wanting() -> torch.Tensor:
    return torch.tensor([1.0, 2.0], requires_grad=True)


#: What came back, and how the message calls it.
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "nothing": (lambda: None, "returned None for prompt 'a' and others"),
    "text": (lambda: "good", "returned 'good' for"),
    "number": (lambda: 0.5, "returned 0.5 for"),
    "texts": (lambda: ["good", "bad"], "returned a list of 2, which begins with 'good' for"),
    "numbers as texts": (lambda: ["0.5", "1"], "returned a list of 2, which begins with '0.5' for"),
    "array of texts": (lambda: np.array(["x", "y"]), "returned an ndarray of shape (2,) in <U1, which begins with 'x'"),
    "array of objects": (lambda: np.array([{}, {}]), "in object, which begins with a dict with the keys [] for"),
    "gradient": (wanting, "returned a Tensor of shape (2,) in torch.float32 that requires a gradient for"),
    "gradients": (lambda: list(wanting()), "which begins with a Tensor of shape () in torch.float32 that requires a"),
    "tensor elsewhere": (lambda: torch.ones(2, device="meta"), "a Tensor of shape (2,) in torch.float32 on meta for"),
    "narrow tensor": (lambda: torch.ones(2, dtype=torch.bfloat16), "a Tensor of shape (2,) in torch.bfloat16 for"),
    "complex": (lambda: np.ones(2, complex), "returned an ndarray of shape (2,) in complex128, which begins with (1"),
    "times": (lambda: np.zeros(2, "datetime64[s]"), "returned an ndarray of shape (2,) in datetime64[s]"),
    "ragged": (lambda: [[1.0], [1.0, 2.0]], "returned a list of 2, which begins with a list of 1, which begins with"),
    "too few": (lambda: [1.0], "returned a list of 1, which begins with 1.0 for"),
    "too many": (lambda: np.ones(3), "returned an ndarray of shape (3,) in float64 for"),
    "several each": (lambda: np.ones((2, 2)), "returned an ndarray of shape (2, 2) in float64 for"),
    "by name": (lambda: {"a": 1.0, "b": 2.0}, "returned a dict with the keys ['a', 'b'] for"),
    "set": (lambda: {1.0, 2.0}, "returned a set for"),
    "generator": (lambda: (each for each in (1.0, 2.0)), "returned a generator for"),
    "map": (lambda: map(float, (1, 2)), "returned a map for"),
    "coroutine": (later, "returned a coroutine for"),
    "async generator": (several, "returned an async_generator for"),
    "function": (lambda: len, "returned a builtin_function_or_method for"),
    "scores of nothing": (lambda: Scores(None), "returned None for"),  # type: ignore[arg-type]
    "scores of texts": (lambda: Scores(["x", "y"]), "returned a list of 2, which begins with 'x' for"),  # type: ignore[arg-type]
    "one remark": (lambda: Scores(np.ones(2), "ab"), "returned 'ab' as remarks for 2 samples"),
    "no remarks": (lambda: Scores(np.ones(2), 3), "returned 3 as remarks for 2 samples"),  # type: ignore[arg-type]
    "few remarks": (lambda: Scores(np.ones(2), ["a"]), "returned a list of 1, which begins with 'a' as remarks"),
    "other remarks": (lambda: Scores(np.ones(2), [1, 2]), "which begins with 1 as remarks"),  # type: ignore[list-item]
}
RIGHT: dict[str, Callable[[], Any]] = {
    "list": lambda: [1.0, 2],
    "tuple": lambda: (1, 2.0),
    "array": lambda: np.array([1, 2]),
    "column": lambda: np.array([[1.0], [2.0]]),
    "objects": lambda: np.array([1, Decimal(2)], object),
    "series": lambda: pd.Series([1.0, 2.0], index=["x", "y"]),
    "tensor": lambda: torch.tensor([1.0, 2.0], dtype=torch.float64),
    "tensors": lambda: list(torch.tensor([1.0, 2.0])),
    "truth": lambda: [True, np.float32(2)],
    "scores": lambda: Scores([1.0, 2.0], ["x", None]),  # type: ignore[arg-type, list-item]
}


def made(returning: Callable[[], Any], how: str, *, groupwise: bool) -> Any:
    """Return a reward, function or class, that returns what it is said to for each two samples."""
    needs = Needs(groupwise=groupwise)
    if how == "function":
        return FunctionReward(lambda media, prompts, metadata: returning(), {}, needs)
    return type("Own", (), {"needs": needs, "score": lambda self, media, prompts, metadata: returning()})()


@pytest.mark.parametrize("groupwise", [False, True], ids=["pointwise", "groupwise"])
@pytest.mark.parametrize("how", ["function", "class"])
@pytest.mark.parametrize("kind", WRONG)
def test_what_is_no_score_per_sample_is_one_message(kind: str, how: str, groupwise: bool) -> None:
    returning, expected = WRONG[kind]
    for handling in (Handling(), Handling(exclude=True)):
        with pytest.raises(RewardError) as error:
            score(made(returning, how, groupwise=groupwise), "mine", BATCH, handling)
        message = str(error.value)
        assert message.startswith("Reward 'mine' returned ")
        assert expected in message
        assert "alone" not in message
        if "remarks" not in message:
            assert "media of shape (2,), (B,) texts in object, and must return scores of shape (2,)" in message


@pytest.mark.parametrize("groupwise", [False, True], ids=["pointwise", "groupwise"])
@pytest.mark.parametrize("how", ["function", "class"])
@pytest.mark.parametrize("kind", RIGHT)
def test_what_is_one_number_per_sample_is_taken(kind: str, how: str, groupwise: bool) -> None:
    found = score(made(RIGHT[kind], how, groupwise=groupwise), "mine", BATCH)
    assert found.values.tolist() == [1.0, 2.0]
    assert found.values.dtype == np.float32
    assert found.notes == (["x", ""] if kind == "scores" else None)


@pytest.mark.parametrize(
    ("values", "said", "fault"),
    [
        ([1.0, None], "None", "not finite"),
        ([1.0, float("nan")], "nan", "not finite"),
        ([1.0, Decimal("nan")], "NaN", "not finite"),
        ([1.0, 1e300], "1e+300", "too large for float32"),
        ([1, 10**400], "1.000000000000000000000000000E+400", "too large for float32"),
    ],
)
def test_a_score_that_is_missing_or_not_finite_is_of_its_sample(values: list[Any], said: str, fault: str) -> None:
    reward = made(lambda: values, "function", groupwise=False)
    with pytest.raises(RewardError) as error:
        score(reward, "mine", BATCH)
    assert f"returned {said} for prompt 'b' (1 of 2 scores are {fault})" in str(error.value)


def test_a_remark_with_half_a_character_can_be_stored() -> None:
    def half() -> Any:
        return Scores(np.ones(2, np.float32), ["nice \ud83d", "\U0001f600"])

    assert score(made(half, "function", groupwise=False), "mine", BATCH).notes == ["nice ?", "\U0001f600"]


def plain(media: Any, prompts: Any, metadata: Any) -> list[int]:
    return [len(text) for text in media]


def test_what_declares_no_media_scores_what_the_run_makes(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    section = RewardSection(name=f"{__name__}:plain")
    needs = needs_of(section.name, {})
    texts, images = RunConfig.model_validate(texts_data(tmp_path)), make_config()
    for config in (texts, images):
        RunPlan(config).modality.check_scored(section, needs, config)
    with pytest.raises(ConfigError, match=r"scores images, but model.policy 'causal_lm' makes texts"):
        RunPlan(texts).modality.check_scored(section, Needs(media="images"), texts)


@pytest.mark.parametrize("name", sorted(set(REWARDS) - {"constant", "rank", "fitted"}))
def test_rewards_of_the_table_say_what_they_score(name: str) -> None:
    """A reward of images that said nothing would be taken for one of texts; a fitted one reads those of its data."""
    label = resolve(REWARDS, name, label="reward")
    declared = [label.needs_for({})] if hasattr(label, "needs_for") else [label.needs]
    given: Mapping[str, Any] = {"by": "pixels", "to": "source", "references": True}
    declared += [label.needs_for(given)] if hasattr(label, "needs_for") else []
    assert {needs.media for needs in declared} <= {"images", "clips", "sounds", "latents", "texts"}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("exact_text", {"column": "solution"}),
        ("rank", {"reward": "digits"}),
        ("rank", {"reward": "exact_text", "options": {"column": "solution"}}),
        ("image_similarity", {"by": "pixels", "to": "source"}),
        ("digits", {}),
    ],
)
def test_a_made_reward_needs_what_its_options_say(name: str, options: dict[str, Any]) -> None:
    assert declared_needs(make_reward(name, options)) == needs_of(name, options) != Needs()
