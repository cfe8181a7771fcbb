"""A reward server that is asked for too much, too slowly, by a page, or while it is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import msgpack  # type: ignore[import-untyped]
import numpy as np
import pytest

from flowmill.configs.errors import ConfigError, RewardError, RewardServiceError
from flowmill.configs.rewards import ServerSection
from flowmill.models.rewards.base import Batch, Needs
from flowmill.models.rewards.factory import make_reward
from flowmill.models.rewards.invocation import Handling, score
from flowmill.models.rewards.remote import RemoteReward
from flowmill.models.rewards.service import guarded, wire
from flowmill.models.rewards.service.app import Served, make_app
from flowmill.models.rewards.service.batching import Limits
from flowmill.models.rewards.service.guarded import METRICS
from flowmill.models.rewards.testing import samples
from flowmill.models.serving import messages
from flowmill.models.serving.retry import PassingError, Patience
from flowmill.models.serving.server_client import RefusedError
from flowmill.tasks.execution.serve_reward import ServeRequest, reward_app
from tests.conftest import ROOT

NAME, SLOW = "constant", "tests.models.rewards.test_reward_server:Slow"
ROWS = "tests.models.rewards.test_busy_server:Rows"
BODY = wire.pack_request(samples(1))
HEADERS = {messages.CHECKSUM: messages.checksum(BODY), wire.REWARD: wire.identity(NAME, {})}

Asking = Callable[[httpx.AsyncClient], Awaitable[list[httpx.Response]]]


def answered(asking: Asking, *, name: str = NAME, **about: Any) -> list[httpx.Response]:
    """Return what a server of a reward answers, in this process."""
    options = about.pop("options", {})
    served = make_app(Served(reward=make_reward(name, options), name=name, options=options, **about))

    async def ask() -> list[httpx.Response]:
        transport = httpx.ASGITransport(served)
        async with (
            served.router.lifespan_context(served),
            httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=30) as client,
        ):
            return await asking(client)

    return asyncio.run(ask())


def remote(name: str, **about: Any) -> RemoteReward:
    """Return the client of a server in this process."""

    def pass_on(request: httpx.Request) -> httpx.Response:
        async def ask(client: httpx.AsyncClient) -> list[httpx.Response]:
            path, headers = request.url.path, request.headers
            return [await client.request(request.method, path, content=request.content, headers=headers)]

        (answer,) = answered(ask, name=name, **about)
        return httpx.Response(answer.status_code, content=answer.content, headers=answer.headers)

    server = ServerSection(url="http://127.0.0.1", patience_s=0.0)
    return RemoteReward(server, name, about.get("options", {}), transport=httpx.MockTransport(pass_on))


async def drip(*, for_s: float) -> AsyncIterator[bytes]:
    """Send a body so slowly that it is there after a while."""
    yield BODY[:10]
    await asyncio.sleep(for_s)
    yield BODY[10:]


class Raising:
    """Fails as an endpoint without an answer, a reward with another number of scores, or for a sample."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def score(self, media: np.ndarray, prompts: Any, metadata: Any) -> list[float]:
        if self.kind == "endpoint":
            raise RewardServiceError("the judge gives no answer")
        if self.kind == "file":
            raise FileNotFoundError(2, "no such file", "two.png")
        if self.kind == "sample":
            raise ValueError("unreadable")
        if self.kind == "half":
            raise ValueError("half \ud83d")
        if self.kind == "setup":
            raise ConfigError("a template is missing")
        if self.kind == "disk":
            raise OSError(5, "the disk is gone")
        return [1.0] * (len(media) + 1)


@pytest.mark.parametrize(
    ("kind", "status", "error"),
    [
        ("endpoint", 503, None),
        ("disk", 503, None),
        ("count", 424, ConfigError),
        ("setup", 424, ConfigError),
        ("file", 422, RewardError),
    ],
)
def test_failures_of_all_samples_are_told_from_those_of_some(
    kind: str, status: int, error: type[Exception] | None
) -> None:
    name, options = "tests.models.rewards.test_busy_server:Raising", {"kind": kind}
    headers = {**HEADERS, wire.REWARD: wire.identity(name, options)}

    async def ask(client: httpx.AsyncClient) -> list[httpx.Response]:
        return [await client.post(wire.SCORE, content=BODY, headers=headers)]

    (answer,) = answered(ask, name=name, options=options)
    assert answer.status_code == status
    if error is not None:
        reward = RemoteReward(ServerSection(url="http://127.0.0.1:1"), name, options)
        assert type(reward._refusal(RefusedError(status, answer.json()["detail"]))) is error


@pytest.mark.parametrize(
    ("kind", "note"),
    [
        ("sample", "failed: ValueError: unreadable"),
        ("half", "failed: ValueError: half ?"),
        ("file", "failed: FileNotFoundError: [Errno 2] no such file: 'two.png'"),
    ],
)
def test_a_sample_that_fails_has_one_remark_here_and_behind_a_server(
    kind: str, note: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    name, options = "tests.models.rewards.test_busy_server:Raising", {"kind": kind}
    for reward in (Raising(kind), remote(name, options=options)):
        assert score(reward, "mine", samples(1), Handling(exclude=True)).notes == [note]


@pytest.mark.parametrize(("prompt", "value"), [("a", 1 << 70), ("\ud83d", 1)])
def test_what_no_message_holds_is_said_of_the_prompts(prompt: str, value: int) -> None:
    batch = Batch(media=np.zeros((1, 8, 8, 3), np.uint8), prompts=[prompt], metadata=[{"id": value}])
    with pytest.raises(ConfigError, match="a prompt or one of its columns cannot be sent there"):
        score(remote(NAME), "mine", batch, Handling(exclude=True))


def test_a_refusal_ends_the_failure_of_a_server() -> None:
    """Busy, then a sample that fails, and busy again much later: that failure has only begun."""
    patience, outcomes = Patience(0.2, sleep=lambda seconds: None), list[Exception]()

    def call() -> str:
        if outcomes:
            raise outcomes.pop(0)
        return "done"

    outcomes += [PassingError("busy"), RefusedError(422, "a black image")]
    with pytest.raises(RefusedError):
        patience.again(call)
    time.sleep(0.3)
    outcomes.append(PassingError("busy"))
    assert patience.again(call) == "done"


def test_rows_of_different_sizes_are_sent_within_the_limit() -> None:
    """As many rows as fit by their mean do not fit where the large ones are together; a single one may be too large."""
    reward = remote(ROWS, max_bytes=300_000)
    texts = np.array(["x" * 200_000] * 3 + ["y"] * 13, object)
    assert len(reward.score(texts, ["a"] * 16, [{}] * 16).values) == 16
    with pytest.raises(RewardError, match="refuses samples: the body is larger than the 300000 bytes"):
        reward.score(np.array(["x" * 400_000, "y"], object), ["a"] * 2, [{}] * 2)


def test_a_body_that_drips_is_given_up_and_its_room_is_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded, "_BODY_S", 0.1)

    async def ask(client: httpx.AsyncClient) -> list[httpx.Response]:
        slow = [await client.post(wire.SCORE, content=drip(for_s=5), headers=HEADERS) for _ in range(3)]
        return [*slow, await client.post(wire.SCORE, content=BODY, headers=HEADERS)]

    begun = time.monotonic()
    # Whoever does not say how long a body is takes the room of the largest.
    *slow, quick = answered(ask, max_bytes=len(BODY))
    assert time.monotonic() - begun < 4
    assert [answer.status_code for answer in slow] == [408] * 3
    assert "was not complete after 0 s; send it again, faster" in slow[0].json()["detail"]
    assert quick.status_code == 200


def test_bodies_wait_outside_and_not_in_memory() -> None:
    """Two of the largest size may be on their way; a third is asked to come again, and one that is small has room."""

    async def ask(client: httpx.AsyncClient) -> list[httpx.Response]:
        begun = [asyncio.create_task(client.post(wire.SCORE, content=drip(for_s=1), headers=HEADERS)) for _ in range(2)]
        await asyncio.sleep(0.2)
        third = await client.post(wire.SCORE, content=drip(for_s=0), headers=HEADERS)
        return [third, *[await each for each in begun]]

    third, *others = answered(ask, max_bytes=len(BODY))
    assert (third.status_code, third.headers["retry-after"]) == (429, "1")
    assert "the bodies of other requests leave 0 bytes" in third.json()["detail"]
    assert [answer.status_code for answer in others] == [200, 200]


def test_samples_wait_in_a_queue_that_is_bounded() -> None:
    body = wire.pack_request(samples(2))
    headers = {messages.CHECKSUM: messages.checksum(body), wire.REWARD: wire.identity(SLOW, {"seconds": 0.3})}

    async def ask(client: httpx.AsyncClient) -> list[httpx.Response]:
        return list(await asyncio.gather(*(client.post(wire.SCORE, content=body, headers=headers) for _ in range(5))))

    found = answered(ask, name=SLOW, options={"seconds": 0.3}, limits=Limits(waiting=4))
    assert sorted(answer.status_code for answer in found) == [200, 200, 429, 429, 429]
    assert "samples wait; ask again later" in next(a for a in found if a.status_code == 429).json()["detail"]


class Rows:
    """Says how many rows a call has."""

    def __init__(self, groupwise: bool = False, batch_size: int | None = None) -> None:
        self.needs = Needs(groupwise=groupwise, batch_size=batch_size)

    def score(self, media: np.ndarray, prompts: Any, metadata: Any) -> list[float]:
        return [float(len(media))] * len(media)


@pytest.mark.parametrize(
    ("options", "more", "rows"),
    [
        ({}, {}, [1, 2, 3]),
        ({}, {"batch_size": 4}, [4, 4, 4]),
        ({"batch_size": 8}, {}, [8, 8, 8]),
        ({"groupwise": True}, {}, [1, 2, 3]),
    ],
)
def test_rows_of_a_call_do_not_depend_on_other_requests(
    options: dict[str, Any], more: dict[str, Any], rows: list[int]
) -> None:
    async def ask(client: httpx.AsyncClient) -> list[httpx.Response]:
        bodies = [wire.pack_request(samples(count)) for count in (1, 2, 3)]
        identity = {wire.REWARD: wire.identity(ROWS, options)}
        each = [({**identity, messages.CHECKSUM: messages.checksum(body)}, body) for body in bodies]
        posts = (client.post(wire.SCORE, content=body, headers=headers) for headers, body in each)
        return list(await asyncio.gather(*posts))

    found = answered(ask, name=ROWS, options=options, limits=Limits(wait_s=0.3), **more)
    values = [wire.unpack_answer(answer.content, count).values for count, answer in enumerate(found, 1)]
    assert [float(each[0]) for each in values] == rows


class Counting:
    """Takes a while, and counts its calls."""

    calls = 0

    def score(self, media: np.ndarray, prompts: Any, metadata: Any) -> list[float]:
        type(self).calls += 1
        time.sleep(0.5)
        return [1.0] * len(media)


def test_samples_of_callers_that_have_gone_are_not_scored() -> None:
    name = "tests.models.rewards.test_busy_server:Counting"
    headers = {**HEADERS, wire.REWARD: wire.identity(name, {})}
    served = make_app(Served(reward=Counting(), name=name, options={}, limits=Limits(join=1)))

    async def impatient() -> None:
        """Send the body, and hang up a little later."""
        messages = [{"type": "http.request", "body": BODY}]

        async def receive() -> dict[str, Any]:
            if not messages:
                await asyncio.sleep(0.2)
            return messages.pop() if messages else {"type": "http.disconnect"}

        async def dropped(message: Any) -> None:
            pass

        sized = {**headers, "content-length": str(len(BODY))}
        pairs = [(key.encode(), value.encode()) for key, value in sized.items()]
        scope = {"type": "http", "method": "POST", "path": wire.SCORE, "headers": pairs, "query_string": b""}
        await served(scope, receive, dropped)

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(served)
        async with (
            served.router.lifespan_context(served),
            httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client,
        ):
            await asyncio.gather(*(impatient() for _ in range(5)))
            answer = await client.post(wire.SCORE, content=BODY, headers=headers)
            text = (await client.get(METRICS)).text
            assert 'requests_total{status="499"} 5.0' in text
            assert "waiting_samples 0.0" in text
            return answer

    assert asyncio.run(ask()).status_code == 200
    assert Counting.calls == 2, "the call that had begun, and that of the patient caller"


def _packed(**changes: Any) -> bytes:
    good = {"dtype": "uint8", "shape": [1, 2, 2, 3], "media": bytes(12), "prompts": ["a"], "metadata": [{}]}
    return bytes(msgpack.packb({**good, **changes}))


@pytest.mark.parametrize(
    "body",
    {
        "empty": b"",
        "json": b'{"prompts": ["a"]}',
        "a pickle": b"\x80\x04\x95.",
        "half": _packed()[:-3],
        "more behind it": _packed() + b"\x00",
        "a list": msgpack.packb([1]),
        "no fields": msgpack.packb({}),
        "another field": _packed(groups=["a"]),
        "keys that are numbers": msgpack.packb({1: 2}),
        "an extension": _packed(media=msgpack.ExtType(1, bytes(12))),
        "another dtype": _packed(dtype="float64"),
        "objects": _packed(dtype="object"),
        "a shape of text": _packed(shape="1,2,2,3"),
        "a shape of nothing": _packed(shape=[1, 0, 2, 3]),
        "a negative shape": _packed(shape=[1, -2, -2, 3]),
        "a fractional shape": _packed(shape=[1.0, 2, 2, 3]),
        "a true shape": _packed(shape=[True, 2, 2, 3]),
        "too few bytes": _packed(media=bytes(11)),
        "texts that are said to be images": _packed(media=["a"]),
        "three axes": _packed(shape=[1, 4, 3]),
        "more prompts than media": _packed(prompts=["a", "b"]),
        "prompts that are no text": _packed(prompts=[b"\xff"]),
        "no prompts": _packed(prompts=[]),
        "metadata that is no mapping": _packed(metadata=["a"]),
        "brackets without end": b"\x91" * 9_000,
        "text that is no utf-8": _packed(prompts=["a"]).replace(b"\xa1a", b"\xa1\xff"),
    }.items(),
    ids=lambda item: item[0],
)
def test_bad_input_of_each_kind_is_400_and_the_next_is_answered(body: tuple[str, bytes]) -> None:
    def headers(content: bytes) -> dict[str, str]:
        return {messages.CHECKSUM: messages.checksum(content), wire.REWARD: wire.identity(NAME, {})}

    async def ask(client: httpx.AsyncClient) -> list[httpx.Response]:
        contents = (body[1], BODY)
        return [await client.post(wire.SCORE, content=each, headers=headers(each)) for each in contents]

    bad, good = answered(ask)
    assert (bad.status_code, good.status_code) == (400, 200)
    assert 10 < len(bad.json()["detail"]) < 1000


def test_headers_that_are_wrong_are_400_or_409() -> None:
    wrong = [
        {**HEADERS, messages.CHECKSUM: "0" * 32},
        {wire.REWARD: HEADERS[wire.REWARD]},
        {**HEADERS, "content-length": "1" * 40},
        {messages.CHECKSUM: HEADERS[messages.CHECKSUM]},
    ]

    async def ask(client: httpx.AsyncClient) -> list[httpx.Response]:
        return [await client.post(wire.SCORE, content=BODY, headers=headers) for headers in wrong]

    assert [answer.status_code for answer in answered(ask)] == [400, 400, 413, 409]


def test_a_caller_that_hangs_up_leaves_no_traceback_and_no_room_taken(caplog: pytest.LogCaptureFixture) -> None:
    served = make_app(Served(reward=make_reward(NAME, {}), name=NAME, options={}, max_bytes=len(BODY)))
    pairs = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
    scope = {"type": "http", "method": "POST", "path": wire.SCORE, "headers": pairs, "query_string": b""}

    async def hang_up() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def dropped(message: Any) -> None:
        pass

    async def ask() -> httpx.Response:
        async with served.router.lifespan_context(served):
            for _ in range(5):
                await served(dict(scope), hang_up, dropped)
            transport = httpx.ASGITransport(served)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
                return await client.post(wire.SCORE, content=BODY, headers=HEADERS)

    assert asyncio.run(ask()).status_code == 200
    assert caplog.records == []


@pytest.mark.parametrize(
    ("token", "headers", "status"),
    [
        ("", {}, 200),
        ("", {"host": "evil.example:8600"}, 403),
        ("", {"origin": "http://evil.example"}, 403),
        ("", {"sec-fetch-site": "cross-site"}, 403),
        # A token says who asks, by whichever name of this machine.
        ("secret", {"host": "rewards.example", "authorization": "Bearer secret"}, 200),
    ],
)
def test_a_page_of_another_origin_is_not_answered(
    token: str, headers: dict[str, str], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(wire.TOKEN, token)

    async def ask() -> list[int]:
        transport = httpx.ASGITransport(reward_app(ServeRequest(name=NAME)))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8600") as client:
            return [(await client.get(path, headers=headers)).status_code for path in (wire.INFO, wire.HEALTH)]

    assert asyncio.run(ask()) == [status, status]


#: The command with less patience for what is being scored.
_SERVE = (
    "import flowmill.flows.cli.http_server as serve; serve._GRACE_S = 1; from flowmill.flows.cli import main; main()"
)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_server_that_is_scoring(number: signal.Signals) -> None:
    command = [sys.executable, "-c", _SERVE, "serve-reward", SLOW, "--set", "seconds=600", "--port", "0"]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that starts tests in the background leaves Ctrl-C ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert process.stdout is not None
        url = next(line for line in process.stdout if "answers at" in line).split()[-1]
        headers = {**HEADERS, wire.REWARD: wire.identity(SLOW, {"seconds": 600})}

        def ask() -> None:
            with contextlib.suppress(httpx.HTTPError):
                httpx.post(f"{url}{wire.SCORE}", content=BODY, headers=headers, timeout=60)

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        deadline = time.monotonic() + 60
        while "flowmill_reward_waiting_samples 1.0" not in (text := httpx.get(f"{url}{METRICS}").text):
            assert time.monotonic() < deadline, text
            time.sleep(0.05)
        process.send_signal(number)
        _, said = process.communicate(timeout=20)
        assert process.returncode == 128 + number
        assert "Traceback" not in said
        asking.join(10)
        assert not asking.is_alive()
    finally:
        process.kill()
