"""Reward servers and judges that drip, bomb and lie: each ends in an error, soon and in little memory."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler
from typing import Any

import httpx
import msgpack  # type: ignore[import-untyped]
import numpy as np
import pytest

from flowmill.configs.errors import FlowmillError, RewardError
from flowmill.configs.rewards import ServerSection
from flowmill.models.rewards.base import Needs
from flowmill.models.rewards.remote import RemoteReward
from flowmill.models.rewards.service import wire
from flowmill.models.rewards.testing import samples
from flowmill.models.rewards.vlm import VlmJudge
from flowmill.models.serving import messages
from tests.support.serving import answering

pytestmark = pytest.mark.slow

_INFO: dict[str, Any] = {
    "name": "constant",
    "options": {},
    "needs": wire.needs_fields(Needs()),
    "perfect": None,
    "max_bytes": 10**8,
}


def hostile(answer: Callable[[BaseHTTPRequestHandler], None]) -> AbstractContextManager[str]:
    """Serve a reward that says of itself what it should, and answers requests for scores by a function."""

    def respond(to: BaseHTTPRequestHandler) -> None:
        if to.command == "POST":
            answer(to)
            return
        body = json.dumps(_INFO).encode()
        to.wfile.write(b"HTTP/1.0 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))

    return answering(respond)


def _drip(head: bytes) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(to: BaseHTTPRequestHandler) -> None:
        to.wfile.write(head)
        for _ in range(200):
            to.wfile.write(b" ")
            to.wfile.flush()
            time.sleep(0.1)

    return answer


def _send(body: bytes, *headers: bytes) -> Callable[[BaseHTTPRequestHandler], None]:
    head = b"".join(b"%s\r\n" % header for header in headers)
    return lambda to: _written(to, b"HTTP/1.0 200 OK\r\ncontent-type: application/json\r\n" + head + b"\r\n" + body)


def _written(to: BaseHTTPRequestHandler, body: bytes) -> None:
    to.wfile.write(body)


_HOSTILE = {
    "a body that drips": (
        _drip(b"HTTP/1.0 200 OK\r\ncontent-length: 100000\r\n\r\n"),
        "timed out|not complete after 1 s",
    ),
    "a head that drips": (_drip(b"HTTP/1.0 200 OK\r\nx-more: "), "timed out|not complete after 1 s"),
    "gzip": (_send(gzip.compress(bytes(1000)), b"content-encoding: gzip"), "compressed"),
    "a length": (_send(b"", b"content-length: 99999999999"), "more than the"),
    "without a length": (_send(bytes(20_000_000)), "more than the"),
}


@pytest.mark.parametrize("label", _HOSTILE)
def test_answers_of_servers_and_judges_are_bounded(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answer, said = _HOSTILE[label]
    monkeypatch.setattr("flowmill.models.rewards.vlm._RETRIES", 0)
    begun = time.monotonic()
    with hostile(answer) as url:
        server = ServerSection(url=url, timeout_s=1.0, patience_s=0.5)
        batch = samples(3)
        given = (batch.media, batch.prompts, batch.metadata)
        with pytest.raises(RewardError, match=said):
            RemoteReward(server, "constant", {}).score(*given)
        with pytest.raises(ConnectionError, match=said):
            VlmJudge(model="m", endpoint=f"{url}/v1", timeout_s=1.0, concurrency=1).score(*given)
    assert time.monotonic() - begun < 15


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 200_000,
        b"[]",
        b'{"choices": "no"}',
        b'{"choices": [{"message": {"content": [1]}}]}',
        b'{"choices": [{"message": 3}]}',
    ],
    ids=["deep", "a list", "choices", "content", "message"],
)
def test_what_is_no_answer_of_a_judge_is_an_error(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowmill.models.rewards.vlm._RETRIES", 0)
    batch = samples(1)
    with hostile(_send(body)) as url, pytest.raises((RewardError, ConnectionError)):
        VlmJudge(model="m", endpoint=f"{url}/v1", timeout_s=5.0).score(batch.media, batch.prompts, batch.metadata)


@pytest.mark.parametrize(
    "body",
    [
        json.dumps({**_INFO, "needs": {}}),
        json.dumps({**_INFO, "needs": {**_INFO["needs"], "media": "nonsense"}}),
        json.dumps({**_INFO, "max_bytes": -1}),
        json.dumps({**_INFO, "perfect": float("nan")}),
        "[" * 200_000,
    ],
)
def test_what_a_server_says_of_itself_is_checked(body: str) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(200, content=body.encode()))
    with pytest.raises(FlowmillError):
        RemoteReward(ServerSection(url="http://x"), "constant", {}, transport=transport).introduce()


def _fields(**changes: Any) -> bytes:
    media = np.zeros((1, 1, 1, 3), np.uint8).tobytes()
    good = {"dtype": "uint8", "shape": [1, 1, 1, 3], "media": media, "prompts": ["a"], "metadata": [{}]}
    return bytes(msgpack.packb({**good, **changes}))


@pytest.mark.parametrize(
    "fields",
    [
        dict(shape=[2**63] * 60_000),
        dict(shape=[2**63] * 1_300_000),
        dict(shape=[]),
        dict(prompts=[1] * 60_000),
        dict(metadata=[{"a": [[]] * 60_000}] * 100),
        dict(metadata=[{"a": [{}] * 60_000}] * 100),
        dict(images=[{"shape": [1, 1, 3], "data": b"."}]),
        dict(images=[{"shape": [1, 3, 1], "data": b"..."}]),
        dict(references=[[0]]),
        dict(references=[[], []]),
        b"\x91" * 12_000_000,
        b"\xdd\xff\xff\xff\xff" * 10,
    ],
    ids=range(12),
)
def test_what_explodes_is_refused_before_it_is_computed_with(fields: dict[str, Any] | bytes) -> None:
    body = fields if isinstance(fields, bytes) else _fields(**fields)
    begun = time.process_time()
    with pytest.raises(messages.WireError) as caught:
        wire.unpack_request(body)
    assert len(str(caught.value)) < 1000
    assert time.process_time() - begun < 5
