"""Rewards over HTTP: real servers, killed, slow, lying and refusing; a run's scores equal the local ones."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from flowmill.configs.errors import ConfigError, RewardError, RewardServiceError
from flowmill.configs.rewards import RewardSection, ServerSection
from flowmill.configs.schema import RunConfig
from flowmill.models.rewards.base import Batch, Needs, Scores
from flowmill.models.rewards.factory import check_section, make_reward, works_on_accelerator
from flowmill.models.rewards.invocation import Handling, score
from flowmill.models.rewards.remote import RemoteReward
from flowmill.models.rewards.service import wire
from flowmill.models.rewards.service.app import Served
from flowmill.models.rewards.service.batching import Batcher, Limits, Metrics
from flowmill.models.rewards.service.guarded import METRICS
from flowmill.models.rewards.testing import CONTRACT, Check, samples
from flowmill.models.serving import messages
from flowmill.tasks.checks.try_rewards import try_rewards
from flowmill.tasks.specs.plan import RunPlan
from tests.support.serving import Server, served, spoiling

pytestmark = pytest.mark.slow

SLOW, JPEG = "tests.models.rewards.test_reward_server:Slow", "jpeg_compressibility"


def asking(body: bytes, name: str, **options: Any) -> dict[str, str]:
    """Return the headers of a request for scores."""
    return {messages.CHECKSUM: messages.checksum(body), wire.REWARD: wire.identity(name, options)}


class Slow:
    """Brightness, which takes a while per call and refuses black images; the remark says how many came together."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Scores:
        time.sleep(self.seconds)
        values = media.reshape(len(media), -1).mean(1, dtype=np.float64).astype(np.float32)
        if (values == 0).any():
            raise ValueError("a black image")
        return Scores(values, [str(len(media))] * len(media))


class OfGroups:
    """How far an image is from the brightest of its group."""

    needs = Needs(media="images", groupwise=True, columns=("count",))

    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> np.ndarray:
        values = media.reshape(len(media), -1).mean(1)
        return np.asarray(values - values.max())


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with served("jpeg_compressibility", "--set", "scale=7") as running:
        yield running


def remote(url: str, name: str = "jpeg_compressibility", *, patience_s: float = 20.0, **more: Any) -> RemoteReward:
    options = {"scale": 7} if name == "jpeg_compressibility" else {}
    about = {"timeout_s": 10.0, "patience_s": patience_s, **more.pop("server", {})}
    return RemoteReward(ServerSection(url=url, **about), name, more.pop("options", options), **more)


def local(batch: Batch) -> np.ndarray:
    return score(make_reward("jpeg_compressibility", {"scale": 7}), "jpeg", batch).values


@pytest.mark.parametrize("holds", CONTRACT, ids=lambda check: check.__name__)
def test_a_served_reward_keeps_the_contract(server: Server, holds: Check) -> None:
    holds(remote(server.url), samples())


def test_scores_equal_the_local_ones_in_parts_of_any_size(server: Server) -> None:
    batch = samples(9, metadata={"count": 3, "what": "ümläut"})
    for size in (None, 1, 4):
        found = score(remote(server.url), "jpeg", batch, Handling(batch_size=size))
        np.testing.assert_array_equal(found.values, local(batch))


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("cut", lambda number, body: None),
        ("truncated", lambda number, body: body[: len(body) // 2]),
        ("not msgpack", lambda number, body: b"<html>" + body[6:]),
        ("a flipped bit", lambda number, body: body[:-3] + bytes([body[-3] ^ 1]) + body[-2:]),
        ("empty", lambda number, body: b""),
    ],
)
def test_spoiled_answers_are_asked_again(
    server: Server, name: str, spoil: Callable[[int, bytes], bytes | None]
) -> None:
    batch = samples(4)
    with spoiling(server.url, lambda number, body: spoil(number, body) if number < 2 else body) as url:
        found = score(remote(url, server={"timeout_s": 2.0}), "jpeg", batch)
    np.testing.assert_array_equal(found.values, local(batch))


def test_a_late_answer_is_asked_again(server: Server) -> None:
    def late(number: int, body: bytes) -> bytes:
        time.sleep(3.0 if number == 0 else 0.0)
        return body

    with spoiling(server.url, late) as url:
        found = score(remote(url, server={"timeout_s": 1.0}), "jpeg", samples(2))
    np.testing.assert_array_equal(found.values, local(samples(2)))


def test_what_stays_malformed_is_never_a_score(server: Server) -> None:
    with (
        spoiling(server.url, lambda number, body: body[:-1] + bytes([body[-1] ^ 1])) as url,
        pytest.raises(RewardError, match=r"has given no answer for 1 s; the last: its answer does not match"),
    ):
        score(remote(url, patience_s=1.0), "jpeg", samples(2))


def test_all_threads_give_up_together_and_one_that_comes_later_asks_once() -> None:
    asked: list[float] = []

    def refuse(request: httpx.Request) -> httpx.Response:
        asked.append(time.monotonic())
        return httpx.Response(503, json={"detail": "no model"})

    reward = remote("http://nowhere", patience_s=0.5, transport=httpx.MockTransport(refuse))
    begun = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        failures = [pool.submit(reward.score, *_three(samples(1))) for _ in range(4)]
    for failure in failures:
        with pytest.raises(RewardError, match=r"it answers 503: no model.*give the same command"):
            failure.result()
    assert time.monotonic() - begun < 10
    before = len(asked)
    with pytest.raises(RewardError, match="it answers 503"):
        reward.score(*_three(samples(1)))
    assert len(asked) == before + 1


def test_a_server_that_comes_back_is_found_again() -> None:
    with served("jpeg_compressibility", "--set", "scale=7") as server:
        reward = remote(server.url, patience_s=60.0)
        first = score(reward, "jpeg", samples(2))
        server.kill()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(score, reward, "jpeg", samples(2))
            time.sleep(1.0)
            assert not waiting.done()
            server.start()
            np.testing.assert_array_equal(waiting.result().values, first.values)


def test_a_server_that_comes_back_with_another_reward_is_refused() -> None:
    with served(JPEG, "--set", "scale=7") as server:
        reward = remote(server.url, patience_s=60.0)
        score(reward, "jpeg", samples(2))
        server.kill()
        server.arguments = (JPEG, "--set", "scale=8")
        server.start()
        with pytest.raises(ConfigError, match=r"\(409\): .*{'scale': 8} is served here, another"):
            score(reward, "jpeg", samples(2))


def test_nothing_that_goes_wrong_stops_the_server() -> None:
    served = Served(reward=Slow(), name="slow", options={})

    def broken(batches: Sequence[Batch]) -> list[Scores]:
        if any("bad" in batch.prompts for batch in batches):
            raise MemoryError("too much")
        return served.score(batches)

    async def ask() -> list[Any]:
        limits, metrics = Limits(wait_s=0.2), Metrics()
        batcher = Batcher(broken, limits=limits, metrics=metrics)
        work = asyncio.create_task(batcher.run())
        bad = Batch(media=np.ones((1, 4, 4, 3), np.uint8), prompts=["bad"], metadata=[{}])
        good = Batch(media=np.ones((1, 4, 4, 3), np.uint8), prompts=["good"], metadata=[{}])
        found = await asyncio.gather(*(batcher.submit(each) for each in (good, bad, good)), return_exceptions=True)
        later = await batcher.submit(good)
        work.cancel()
        return [*found, later]

    first, failed, third, later = asyncio.run(ask())
    assert isinstance(failed, MemoryError)
    assert [each.values.tolist() for each in (first, third, later)] == [[1.0]] * 3


@pytest.mark.campaign
def test_requests_are_scored_together_and_one_that_fails_fails_alone() -> None:
    with served(SLOW, "--set", "seconds=0.5", "--batch-size", "8") as server:
        good, black = samples(3), Batch(media=np.zeros((1, 64, 64, 3), np.uint8), prompts=["p"], metadata=[{}])
        reward = remote(server.url, SLOW, options={"seconds": 0.5}, server={"concurrency": 8})
        expected = score(Slow(), "slow", good).values
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(score, reward, "slow", good) for _ in range(6)]
            found = [each.result() for each in asked]
        for each in found:
            np.testing.assert_array_equal(each.values, expected)
        calls = re.search(r"flowmill_reward_call_seconds_count (\d+)", httpx.get(f"{server.url}{METRICS}").text)
        assert calls is not None
        assert int(calls[1]) < 6, "several requests in one call"
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(score, reward, "slow", good) for _ in range(3)]
            failing = pool.submit(score, reward, "slow", black)
            for each in asked:
                np.testing.assert_array_equal(each.result().values, expected)
            with pytest.raises(RewardError, match="ValueError: a black image"):
                failing.result()
        metrics = httpx.get(f"{server.url}{METRICS}").text
        assert 'flowmill_reward_requests_total{status="422"} 1.0' in metrics
        assert "flowmill_reward_waiting_samples 0.0" in metrics


def test_a_groupwise_reward_is_asked_group_by_group() -> None:
    name = "tests.models.rewards.test_reward_server:OfGroups"
    batch = samples(6, metadata={"count": 1})
    with served(name) as server:
        reward = remote(server.url, name)
        assert reward.needs == Needs(media="images", groupwise=True, columns=("count",))
        np.testing.assert_array_equal(score(reward, "g", batch).values, score(OfGroups(), "g", batch).values)


def test_images_that_prompts_start_from_go_along() -> None:
    name, options = "image_similarity", {"to": "source", "by": "ssim"}
    batch = samples(6, references=2)
    # Samples of one prompt start from the very same image, which goes over the wire once.
    shared = replace(batch, references=[batch.references[0]] * 6)
    assert len(wire.pack_request(batch)) - len(wire.pack_request(shared)) > 9 * batch.references[0][0].nbytes
    with served(name, "--set", "to=source", "--set", "by=ssim") as server:
        reward = remote(server.url, name, options=options)
        assert reward.needs == Needs(media="images", references=True)
        for each in (batch, shared):
            expected = score(make_reward(name, options), "s", each).values
            np.testing.assert_array_equal(score(reward, "s", each).values, expected)


def test_the_token_is_wanted_and_health_is_not_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(wire.TOKEN, raising=False)
    with served("constant", **{wire.TOKEN: "right"}) as server:
        assert httpx.get(f"{server.url}{wire.HEALTH}").json() == {"status": "ready", "reward": "constant"}
        for path in (wire.INFO, METRICS):
            assert httpx.get(f"{server.url}{path}").status_code == 401
        for token in (None, "wrong"):
            if token is not None:
                monkeypatch.setenv(wire.TOKEN, token)
            with pytest.raises(ConfigError, match=r"refuses to answer \(401\): the token is missing or wrong"):
                score(remote(server.url, "constant"), "c", samples(1))
        monkeypatch.setenv(wire.TOKEN, "right")
        assert score(remote(server.url, "constant"), "c", samples(1)).values.tolist() == [0.0]


def test_a_request_larger_than_allowed_is_refused_and_the_client_sends_smaller_ones() -> None:
    batch = samples(6, shape=(300, 300, 3))
    with served("jpeg_compressibility", "--set", "scale=7", "--max-mb", "1") as server:
        body = wire.pack_request(batch)
        assert len(body) > 1_000_000
        refused = httpx.post(f"{server.url}{wire.SCORE}", content=body, headers=asking(body, JPEG, scale=7))
        assert refused.status_code == 413
        np.testing.assert_array_equal(score(remote(server.url), "jpeg", batch).values, local(batch))
        huge = samples(1, shape=(700, 700, 3))
        with pytest.raises(RewardError, match=r"refuses samples: the body is larger than the 1000000 bytes"):
            score(remote(server.url), "jpeg", huge)


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        (
            lambda url: remote(url, options={"scale": 8}),
            "it serves 'jpeg_compressibility' with the options {'scale': 7}",
        ),
        (lambda url: remote(url, "ocr"), "but the config wants 'ocr'"),
        (lambda url: remote(f"{url}/elsewhere"), r"refuses to answer \(404\)"),
        (lambda url: remote("ftp://nowhere"), "the address cannot be used"),
        (lambda url: remote("nowhere"), "the address cannot be used"),
    ],
)
def test_another_server_is_refused(server: Server, reward: Callable[[str], RemoteReward], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        score(reward(server.url), "x", samples(1))


def test_a_run_waits_little_for_a_server_that_never_answered(
    make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowmill.models.rewards.remote._FIRST_S", 0.5)
    begun = time.monotonic()
    with pytest.raises(RewardError, match=r"at http://127.0.0.1:9 has given no answer for 0.5 s; .*Start it"):
        try_rewards(RunPlan(make_config("rewards=[{name: digits, server: 'http://127.0.0.1:9'}]")))
    assert time.monotonic() - begun < 30


@pytest.mark.parametrize("exclude", [False, True])
def test_a_lost_server_stops_the_run_though_failed_samples_are_left_out(server: Server, exclude: bool) -> None:
    with spoiling(server.url, lambda number, body: None) as url:
        reward = remote(url, patience_s=0.5)
        assert reward.needs.media == "images"
        with pytest.raises(RewardServiceError, match=r"has given no answer for 0.5 s"):
            score(reward, "jpeg", samples(2), Handling(exclude=exclude))


def test_texts_are_sent_in_parts_within_the_servers_limit() -> None:
    limit, sizes = 200_000, list[int]()

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == wire.INFO:
            fields = wire.NeedsFields(**wire.needs_fields(Needs(media="texts")))
            info = wire.RewardInfo(name="lexicon", options={}, needs=fields, perfect=None, max_bytes=limit)
            return httpx.Response(200, json=info.model_dump(exclude_defaults=True))
        sizes.append(len(request.read()))
        scores = wire.pack_answer(Scores(np.zeros(len(wire.unpack_request(request.content)), np.float32)))
        return httpx.Response(200, content=scores, headers={messages.CHECKSUM: messages.checksum(scores)})

    reward = remote("http://any", "lexicon", options={}, transport=httpx.MockTransport(answer))
    texts = np.array(["ümläut " * 1000] * 100, object)
    assert len(reward.score(texts, ["what?"] * 100, [{}] * 100).values) == 100
    assert len(sizes) > 1
    assert max(sizes) <= limit


def test_a_server_needs_nothing_of_the_reward_here() -> None:
    section = RewardSection(name="only_there:Reward", server="http://127.0.0.1:1")  # type: ignore[arg-type]
    assert section.server is not None
    assert section.server.url == "http://127.0.0.1:1"
    check_section(section)
    assert not works_on_accelerator(section)


def test_a_server_loads_no_more_than_its_reward_needs(tmp_path: Path) -> None:
    """A server cannot import packages that its own environment lacks."""
    for name in ("torch", "prefect", "mlflow", "diffusers", "transformers", "pyarrow", "httpx", "sqlalchemy"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('{name} was imported')")
    batch = samples(2)
    with served("jpeg_compressibility", "--set", "scale=7", PYTHONPATH=str(tmp_path)) as server:
        np.testing.assert_array_equal(score(remote(server.url), "jpeg", batch).values, local(batch))


def _three(batch: Batch) -> tuple[np.ndarray, Sequence[str], Sequence[Mapping[str, Any]]]:
    return batch.media, batch.prompts, batch.metadata
