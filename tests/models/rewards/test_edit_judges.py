"""Judges that see what an edit was made of, behind a real HTTP endpoint: what they are shown and asked, and say."""

from __future__ import annotations

import base64
import io
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flowmill.configs.errors import ConfigError, RewardError
from flowmill.models.rewards.base import Batch, Scores, declare
from flowmill.models.rewards.factory import FunctionReward, make_reward, needs_of
from flowmill.models.rewards.invocation import score
from flowmill.models.rewards.pairwise import win_rates
from tests.support.chat import Endpoint, says, serving

pytest.importorskip("regex", reason="flowmill[vlm] is not installed")

RATIONAL = """# User Request Analysis
The score of a text faithfulness of 1.0 would be wrong.
# Detailed Judgement
1. Text Faithfulness:
## Justification: The cat is blue. Score: see below.
## Score: 4.0
2. **Image Faithfulness:**
## Justification: The chair moved.
## Score: **2.5**
3. Physical and Visual Quality:
## Score: 3.5
4. Text Rendering:
## Justification: none asked for
## Score: {text}
# Summary: fine. Score: 1.0
"""


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with serving() as server:
        yield server


def flat(value: int, height: int = 16, width: int = 24) -> np.ndarray:
    return np.full((height, width, 3), value, np.uint8)


def judged(server: Endpoint, name: str, values: list[int], *, sources: list[list[int]], **options: Any) -> Scores:
    """Score flat images of one group, with flat sources of another size."""
    reward = make_reward(name, {"model": "judge", "endpoint": server.url} | options)
    references = [[flat(value, 8, 32) for value in row] for row in sources]
    media = np.stack([flat(value) for value in values])
    prompts = [f"edit {n}" for n in range(len(values))]
    groups = ["g"] * len(values)
    about: list[dict[str, Any]] = [{}] * len(values)
    batch = Batch(media=media, prompts=prompts, metadata=about, groups=groups, references=references)
    return score(reward, name, batch)


def shown(request: dict[str, Any]) -> list[str | tuple[int, tuple[int, int]]]:
    """Return what a request shows, in order: texts, and of images the brightness and the size."""
    found: list[str | tuple[int, tuple[int, int]]] = []
    for part in request["messages"][0]["content"]:
        if part["type"] == "text":
            found.append(part["text"])
            continue
        data = base64.b64decode(part["image_url"]["url"].partition("base64,")[2])
        image = Image.open(io.BytesIO(data))
        found.append((int(np.asarray(image)[0, 0, 0]), image.size))
    return found


def test_a_judge_sees_the_sources_then_the_edit_then_the_instruction(endpoint: Endpoint) -> None:
    judged(endpoint, "vlm_judge", [9], sources=[[1, 2]], references=True)
    *seen, question = shown(endpoint.requests[0])
    assert seen == ["Source image 1:", (1, (32, 8)), "Source image 2:", (2, (32, 8)), "Edited image:", (9, (24, 16))]
    assert "by this instruction: edit 0" in str(question)
    judged(endpoint, "vlm_judge", [9], sources=[[1]], references=True)
    assert shown(endpoint.requests[1])[:2] == ["Source image:", (1, (32, 8))]
    # Without the option a judge is asked what it was before, whatever there is.
    judged(endpoint, "vlm_judge", [9], sources=[[1]])
    assert [type(part) for part in shown(endpoint.requests[2])] == [tuple, str]


def test_yes_is_asked_about_an_edit_too(endpoint: Endpoint) -> None:
    endpoint.answer = lambda request: says("Yes", Yes=0.6, no=0.2)
    found = judged(endpoint, "vlm_judge", [9], sources=[[1]], references=True, ask="yes")
    np.testing.assert_allclose(found.values, [0.75], rtol=1e-6)
    assert "keep everything else as it was" in str(shown(endpoint.requests[0])[-1])


@pytest.mark.parametrize(
    ("rubric", "answer", "mean", "least"),
    [
        # (20 + 10) / 50
        ("unified", '{"reasoning": "score: [1, 1]", "score" : [20, 10.0]}', 0.6, 0.4),
        # (4 + 2.5 + 3.5) / 3 = 10 / 3, of 1 to 4
        ("rational", RATIONAL.format(text="N/A"), 7 / 9, 0.5),
        # (4 + 2.5 + 3.5 + 1.2) / 4 = 2.8
        ("rational", RATIONAL.format(text="1.2"), 0.6, 0.2 / 3),
        ("edit_reward", "Instruction Following: 1\nNo.\n**Instruction Following:** 4\nVisual Quality: 2.5", 0.75, 0.5),
    ],
)
def test_the_scores_of_every_rubric_by_hand(
    endpoint: Endpoint, rubric: str, answer: str, mean: float, least: float
) -> None:
    endpoint.answer = lambda request: says(answer)
    for over, expected in (("mean", mean), ("min", least)):
        found = judged(endpoint, "edit_reward", [9], sources=[[1]], rubric=rubric, over=over)
        np.testing.assert_allclose(found.values, [expected], rtol=1e-6)
        assert list(found.notes or []) == [answer]
    assert len(shown(endpoint.requests[0])) == 5


@pytest.mark.parametrize("rubric", ["unified", "rational", "edit_reward"])
def test_a_judge_that_answers_as_it_is_asked_is_understood(endpoint: Endpoint, rubric: str) -> None:
    """The form that a rubric's own words give, filled in."""

    def filled(request: dict[str, Any]) -> dict[str, Any]:
        form = str(shown(request)[-1])
        return says(
            form.replace("success, restraint", "25, 25").replace("Score: ...", "Score: 4").replace(": N", ": 4")
        )

    endpoint.answer = filled
    assert judged(endpoint, "edit_reward", [9], sources=[[1]], rubric=rubric).values.tolist() == [1.0]


@pytest.mark.parametrize(
    ("rubric", "answer", "said"),
    [
        ("unified", "I cannot say.", "lacks a score"),
        ("unified", '"score": [20]', "lacks a score"),
        ("unified", '"score": [20, 26]', r"has the scores \[20.0, 26.0\]"),
        ("rational", RATIONAL.replace("2.5", "good"), "lacks a score"),
        ("rational", RATIONAL.replace("4.0", "0.5"), "has the scores"),
        ("edit_reward", "Instruction Following: 3", "lacks a score"),
    ],
)
def test_an_answer_that_lacks_a_score_is_no_score(endpoint: Endpoint, rubric: str, answer: str, said: str) -> None:
    endpoint.answer = lambda request: says(answer)
    with pytest.raises(RewardError, match=rf"the answer about prompt 'edit 0' {said}.*expected all of the rubric"):
        judged(endpoint, "edit_reward", [9], sources=[[1]], rubric=rubric)


def by_brightness(request: dict[str, Any]) -> dict[str, Any]:
    """Prefer the brighter of the last two images; of equal ones none."""
    (first, _), (second, _) = [part for part in shown(request) if isinstance(part, tuple)][-2:]
    if first == second:
        return says("They are equally good.")
    return says(f"Image 1 has flaws.\nImage {1 if first > second else 2} is better")


def always_first(request: dict[str, Any]) -> dict[str, Any]:
    return says("Image 1 is better")


@pytest.mark.parametrize(
    ("answer", "both", "rates", "asked"),
    [
        # 10 beats nothing, the two 20 beat 10 and tie, 30 beats all.
        (by_brightness, True, [0, 1.5 / 3, 1.5 / 3, 1], 12),
        (by_brightness, False, [0, 1.5 / 3, 1.5 / 3, 1], 6),
        # A judge that prefers a place says nothing where it is asked in both orders.
        (always_first, True, [0.5] * 4, 12),
        (always_first, False, [1, 2 / 3, 1 / 3, 0], 6),
    ],
)
def test_win_rates_by_hand(
    endpoint: Endpoint, answer: Callable[..., Any], both: bool, rates: list[float], asked: int
) -> None:
    endpoint.answer = answer
    found = judged(endpoint, "win_rate", [10, 20, 20, 30], sources=[[1]] * 4, both_orders=both, references=True)
    np.testing.assert_allclose(found.values, rates, rtol=1e-6)
    assert len(endpoint.requests) == asked
    assert shown(endpoint.requests[0])[:2] == ["Source image:", (1, (32, 8))]
    assert shown(endpoint.requests[0])[2::2][:2] == ["Image 1:", "Image 2:"]
    if answer is by_brightness:
        assert list(found.notes or [])[1] == "1 won, 1 tied, 1 lost"


def test_win_rates_are_those_of_a_slow_count() -> None:
    draw = np.random.default_rng(0)
    results = np.full((6, 6), np.nan)
    for one, two in itertools.combinations(range(6), 2):
        results[one, two] = draw.choice([0, 0.5, 1])
        results[two, one] = 1 - results[one, two]
    slow = [sum(results[row, other] for other in range(6) if other != row) / 5 for row in range(6)]
    np.testing.assert_allclose(win_rates(results), slow, rtol=1e-6)
    assert win_rates(results).sum() == pytest.approx(3.0)
    assert win_rates(np.full((1, 1), np.nan)).tolist() == [0.0]


def test_a_pair_without_a_winner_is_an_error(endpoint: Endpoint) -> None:
    endpoint.answer = lambda request: says("Who knows?")
    with pytest.raises(RewardError, match="finds no winner in the answer about a pair of prompt 'edit 0'"):
        judged(endpoint, "win_rate", [10, 20], sources=[])


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("edit_reward", {"rubric": "mine"}, "it must be 'unified', 'rational' or 'edit_reward'"),
        ("edit_reward", {"over": "max"}, "must be 'mean' or 'min'"),
        ("edit_reward", {"question": "Is it good?"}, "Write {prompt} where the prompt goes"),
        ("win_rate", {"question": "Which?"}, "Write {prompt} where the prompt goes"),
        ("win_rate", {"pattern": "better"}, "has no group"),
    ],
)
def test_options_that_cannot_work_are_refused(
    endpoint: Endpoint, name: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        judged(endpoint, name, [1], sources=[[1]], **options)


@declare(references=True)
def kept(media: np.ndarray, prompts: Any, metadata: Any, references: Any, scale: float = 255.0) -> np.ndarray:
    """A function as a reward, which compares with the sources."""
    return np.array(
        [1 - abs(image.mean() - each[0].mean()) / scale for image, each in zip(media, references, strict=True)]
    )


@declare(references=True)
def without_room(media: np.ndarray, prompts: Any, metadata: Any) -> list[float]:
    return [0.0] * len(media)


def test_a_function_of_ones_own_is_given_the_sources() -> None:
    name = f"{__name__}:kept"
    assert needs_of(name, {}).references
    made = make_reward(name, {"scale": 100.0})
    assert isinstance(made, FunctionReward)
    batch = Batch(
        media=np.stack([flat(10), flat(60)]), prompts=["", ""], metadata=[{}] * 2, references=[[flat(10)]] * 2
    )
    np.testing.assert_allclose(score(made, "kept", batch).values, [1.0, 0.5])
    with pytest.raises(ConfigError, match=r"is called with \(media, prompts, metadata, references\)"):
        make_reward(f"{__name__}:without_room", {})
