"""A judge behind a real HTTP endpoint: what it asks, what it reads, and what it does when answers fail."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flowmill.configs.errors import ConfigError, RewardError, RewardServiceError
from flowmill.models.rewards.base import Batch
from flowmill.models.rewards.factory import make_reward
from flowmill.models.rewards.invocation import Handling, score
from tests.support.chat import Endpoint, says, serving
from tests.support.rewards import scored

pytest.importorskip("regex", reason="flowmill[vlm] is not installed")


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.setattr("flowmill.models.rewards.vlm._PAUSE_S", 0.01)
    with serving() as server:
        yield server


def judged(server: Endpoint, count: int = 3, **options: Any) -> Any:
    media = np.random.default_rng(0).integers(0, 256, (count, 64, 96, 3), np.uint8)
    reward = make_reward("vlm_judge", {"model": "judge", "endpoint": server.url} | options)
    return scored(reward, "vlm_judge", media, [f"prompt {n}" for n in range(count)], [{}] * count)


def shown(request: dict[str, Any]) -> tuple[Image.Image, str]:
    """Return image and question of a request."""
    picture, text = request["messages"][0]["content"]
    data = base64.b64decode(picture["image_url"]["url"].partition("base64,")[2])
    return Image.open(io.BytesIO(data)), text["text"]


def test_each_image_is_judged_with_its_prompt_in_order(endpoint: Endpoint) -> None:
    endpoint.answer = lambda request: says(
        f"Fine.\n**Final Score: {'1234'[int(shown(request)[1].split('prompt ')[1][0])]}**"
    )
    found = judged(endpoint, 4)
    np.testing.assert_allclose(found.values, [0.2, 0.4, 0.6, 0.8])
    assert found.notes[0] == "Fine.\n**Final Score: 1**"
    assert {request["model"] for request in endpoint.requests} == {"judge"}
    assert {request["temperature"] for request in endpoint.requests} == {0.0}
    assert {shown(request)[0].size for request in endpoint.requests} == {(96, 64)}


def test_the_probability_of_yes_is_of_yes_and_no(endpoint: Endpoint) -> None:
    endpoint.answer = lambda request: says("Yes", **{"Yes": 0.5, " yes": 0.1, "no": 0.2, "maybe": 0.2})
    np.testing.assert_allclose(judged(endpoint, 1, ask="yes").values, [0.6 / 0.8], rtol=1e-6)
    (request,) = endpoint.requests
    assert (request["max_tokens"], request["logprobs"], request["top_logprobs"]) == (1, True, 20)


def test_options_change_what_is_asked_and_read(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint.answer = lambda request: says("grade=7/10")
    monkeypatch.setenv("MY_KEY", "secret")
    options = {"question": "Grade {prompt}!", "pattern": r"grade=(\d+)", "scale": 10.0, "size": 48}
    found = judged(endpoint, 1, key_variable="MY_KEY", **options)
    np.testing.assert_allclose(found.values, [0.7])
    picture, question = shown(endpoint.requests[0])
    assert (picture.size, question) == ((48, 32), "Grade prompt 0!")
    assert endpoint.keys == ["Bearer secret"]
    monkeypatch.setenv("OPENAI_BASE_URL", endpoint.url)
    reward = make_reward("vlm_judge", {"model": "judge", **options})
    assert scored(reward, "x", np.zeros((1, 8, 8, 3), np.uint8), ["p"], [{}]).values[0] == np.float32(0.7)


@pytest.mark.parametrize(
    "body",
    [
        b"<html>starting</html>",
        b"",
        b'{"error": {"message": "overloaded", "code": 429}}',
        b'{"choices": []}',
        b"[" * 9999,
    ],
    ids=["a page", "nothing", "an error", "no choice", "deep"],
)
def test_an_answer_that_is_no_completion_is_asked_again(endpoint: Endpoint, body: bytes) -> None:
    endpoint.faults = [body, body]
    np.testing.assert_allclose(judged(endpoint, 2).values, [0.8, 0.8])
    endpoint.faults = [body] * 100
    reward = make_reward("vlm_judge", {"model": "judge", "endpoint": endpoint.url})
    batch = Batch(media=np.zeros((1, 8, 8, 3), np.uint8), prompts=["a"], metadata=[{}])
    with pytest.raises(ConnectionError, match="its answer is no chat completion: ") as error:
        score(reward, "vlm_judge", batch, Handling(exclude=True))
    assert repr(body.decode()[:200]) in str(error.value)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_an_overloaded_endpoint_is_asked_again(endpoint: Endpoint, status: int) -> None:
    endpoint.faults = [status, status]
    np.testing.assert_allclose(judged(endpoint, 2).values, [0.8, 0.8])
    endpoint.faults = [status] * 100
    with pytest.raises(ConnectionError, match="the endpoint of model 'judge' failed"):
        judged(endpoint, 1)


def test_an_endpoint_that_is_gone_is_a_lost_connection(endpoint: Endpoint) -> None:
    url = endpoint.url
    endpoint.shutdown()
    endpoint.server_close()
    reward = make_reward("vlm_judge", {"model": "judge", "endpoint": url})
    with pytest.raises(ConnectionError):
        scored(reward, "x", np.zeros((1, 8, 8, 3), np.uint8), ["p"], [{}])


@pytest.mark.parametrize(
    ("answer", "options", "said"),
    [
        (says("I cannot say."), {}, "finds no score in the answer about prompt 'prompt 0'"),
        (says("Final Score: 9"), {}, "finds no score"),
        (says(""), {}, "finds no score"),
        (says("maybe", maybe=0.9), {"ask": "yes"}, "neither yes nor no begins"),
        (says("yes"), {"ask": "yes"}, "tells no probabilities of tokens for '.*'; it must support"),
    ],
)
def test_an_answer_without_a_score_is_no_score(
    endpoint: Endpoint, answer: dict[str, Any], options: dict[str, Any], said: str
) -> None:
    endpoint.answer = lambda request: answer
    with pytest.raises(RewardError, match=said):
        judged(endpoint, 1, **options)


def test_a_wrong_key_or_model_is_said(endpoint: Endpoint) -> None:
    endpoint.faults = [401]
    with pytest.raises(RewardError, match=r"(?s)refuses to answer .* with model 'judge'.*OPENAI_API_KEY"):
        judged(endpoint, 1)


@pytest.mark.parametrize("status", [401, 403, 404, 413])
def test_a_refusal_of_all_requests_is_a_failure_of_no_sample(endpoint: Endpoint, status: int) -> None:
    endpoint.faults = [status] * 9
    reward = make_reward("vlm_judge", {"model": "judge", "endpoint": endpoint.url})
    batch = Batch(media=np.zeros((1, 8, 8, 3), np.uint8), prompts=["a"], metadata=[{}])
    if status == 413:
        assert np.isnan(score(reward, "vlm_judge", batch, Handling(exclude=True)).values).all()
        return
    with pytest.raises(RewardServiceError, match=str(status)):
        score(reward, "vlm_judge", batch, Handling(exclude=True))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"endpoint": None}, "has no endpoint"),
        ({"question": "Is it good?"}, "Write {prompt} where the prompt goes"),
        ({"pattern": "Score"}, "has no group"),
        ({"concurrency": 0}, "concurrency is 0; it must be greater than 0"),
        ({"timeout_s": 0}, "timeout_s is 0; it must be greater than 0"),
    ],
)
def test_options_that_cannot_work_are_refused(endpoint: Endpoint, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        judged(endpoint, 1, **options)
