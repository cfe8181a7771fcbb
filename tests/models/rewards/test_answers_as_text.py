"""Answers of servers are read as UTF-8, whatever charset they name, and within the time a request may take."""

from __future__ import annotations

import codecs
import encodings.aliases
import io
import re
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler
from typing import Any

import httpx
import numpy as np
import pytest

from flowmill.configs.answers import json_of, text_of
from flowmill.configs.errors import ConfigError, FlowmillError, RewardError
from flowmill.configs.rewards import ServerSection
from flowmill.flows.api import named_server
from flowmill.models.engines.openai import OpenAI
from flowmill.models.rewards.chat_answers import Answer, first_token, read_answer
from flowmill.models.rewards.remote import RemoteReward
from flowmill.models.rewards.vlm import VlmJudge
from flowmill.models.serving.http_client import bounded_client
from flowmill.models.serving.retry import PassingError
from flowmill.tasks.tracking.client import open_client
from tests.conftest import ROOT
from tests.support.serving import answering

#: Every codec of Python, and some names that are none.
CHARSETS = sorted({*encodings.aliases.aliases.values(), "undefined", "idna", "punycode", "unicode_escape", "nonsense"})


def saying(status: int, charset: str, body: bytes) -> AbstractContextManager[str]:
    """Serve one answer to every request."""

    def answer(to: BaseHTTPRequestHandler) -> None:
        to.send_response(status)
        to.send_header("content-type", f"text/plain; charset={charset}")
        to.send_header("content-length", str(len(body)))
        to.end_headers()
        to.wfile.write(body)

    return answering(answer)


@pytest.fixture(scope="module")
def hooks() -> list[Callable[[httpx.Response], None]]:
    """The functions that a client of rewards calls with each answer."""
    return bounded_client(1.0).event_hooks["response"]


def test_no_codec_but_utf_8_reads_an_answer(
    hooks: list[Callable[[httpx.Response], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    body = "é 47 \udcff".encode("utf-8", "surrogateescape")
    found: list[str] = []
    lookup = codecs.lookup
    monkeypatch.setattr(codecs, "lookup", lambda name: found.append(name) or lookup(name))
    for charset in CHARSETS:
        answer = httpx.Response(400, content=body, headers={"content-type": f"text/plain; charset={charset}"})
        answer.request = httpx.Request("GET", "http://x")
        for hook in hooks:
            hook(answer)
        assert answer.text == text_of(body) == "é 47 �", charset
    assert {lookup(name).name for name in found} <= {"utf-8"}


def test_json_is_utf_8_and_ends() -> None:
    assert json_of('{"a": "é"}'.encode()) == {"a": "é"}
    for body in ('{"a": 1}'.encode("utf-16"), '{"a": 1}'.encode("utf-32"), b'"\xff"', b"[" * 100_000):
        with pytest.raises(ValueError, match=r"decode|Expecting|nested"):
            json_of(body)


def test_nothing_reads_an_answer_in_another_way() -> None:
    """Methods of httpx's answers take the charset of a header, or guess one."""
    rooms = ("configs", "flows", "models", "storage", "tasks")
    sources = [(path, path.read_text()) for room in rooms for path in (ROOT / room).rglob("*.py")]
    readers = {path: text for path, text in sources if re.search(r"import (httpx|requests|aiohttp)\b", text)}
    assert len(readers) >= 4
    assert not [path for path, text in readers.items() if re.search(r"\.text\b(?!\()|\.json\(\)|\.encoding\b", text)]


ASKED: dict[str, Callable[[str], Any]] = {
    "reward": lambda url: RemoteReward(ServerSection(url=url, timeout_s=5, patience_s=1), "digits", {}).needs,
    "engine": lambda url: OpenAI(endpoint=f"{url}/v1", model="m", timeout_s=5, patience_s=1).prove([1, 2], [-1.0]),
    "judge": lambda url: judge(url).score(np.zeros((1, 8, 8, 3), np.uint8), ["a"], [{}]),
    "prefect": lambda url: prefect(url),
}


def judge(url: str, **options: Any) -> VlmJudge:
    return VlmJudge(model="m", endpoint=f"{url}/v1", **{"timeout_s": 5.0, **options})


def prefect(url: str) -> None:
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with temporary_settings({PREFECT_API_URL: f"{url}/api"}), named_server() as client:
        client.read_work_pools()


@pytest.mark.slow
@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize(("status", "charset"), [(400, "bz2_codec"), (403, "punycode"), (404, "undefined")])
def test_a_refusal_in_any_charset_is_a_message(
    asked: str, status: int, charset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowmill.models.rewards.vlm._RETRIES", 0)
    begun = time.monotonic()
    with saying(status, charset, b"a" * 200_000) as url, pytest.raises((FlowmillError, ConnectionError)) as caught:
        ASKED[asked](url)
    assert len(str(caught.value)) < 250_000
    assert time.monotonic() - begun < 20


_MANY = (1 << 19) // 3 - 100
_EXPLODING = {
    "choices": b'{"choices": [' + b",".join([b"{}"] * _MANY) + b"]}",
    "calls": b'{"choices":[{"message":{"content":"","tool_calls":[' + b",".join([b"{}"] * (_MANY - 50)) + b"]}}]}",
    "tokens": b'{"choices":[{"message":{"content":"yes"},"logprobs":{"content":[{"top_logprobs":['
    + b",".join([b"{}"] * (_MANY - 50))
    + b"]}]}}]}",
    "spaces": b'{"choices":[{"message":{"content":"Final Score:' + b" " * 131_000 + b'"}}]}',
    "long": b'{"choices":[{"message":{"content":"Final Score:' + b" " * 500_000 + b'"}}]}',
}


@pytest.mark.slow
@pytest.mark.parametrize("label", _EXPLODING)
def test_reading_an_answer_is_inside_the_time_of_the_request(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowmill.models.rewards.vlm._RETRIES", 0)
    begun = time.monotonic()
    body = _EXPLODING[label]
    assert len(body) < 1 << 19
    with saying(200, "utf-8", body) as url, pytest.raises((RewardError, ConnectionError)) as caught:
        judge(url, timeout_s=2.0).score(np.zeros((1, 8, 8, 3), np.uint8), ["a"], [{}])
    assert len(str(caught.value)) < 1000
    assert time.monotonic() - begun < 20


def test_a_search_ends_when_the_request_does() -> None:
    begun = time.monotonic()
    with pytest.raises(RewardError, match="is not done with an answer of 300012 characters"):
        Answer(text="Final Score:" + " " * 300_000, until=begun + 0.2).find_all(VlmJudge.pattern)
    assert time.monotonic() - begun < 5
    assert Answer(text="Score: 3 score: 4.5", until=begun + 60).find_all(r"score: (\d+(\.\d)?)", ignore_case=True) == [
        "3",
        "4.5",
    ]
    assert Answer(text="a tie").find_all(r"\b(?:equal|tie)\b") == ["tie"]


def test_a_chat_completion_is_read_as_the_protocol_says() -> None:
    said = b'{"choices": [{"message": {"content": null}, "logprobs": null}]}'
    assert read_answer(said) == Answer(text="")
    reported = b'{"choices": [{"message": {"content": "Yes"}, "logprobs": {"content": [{"top_logprobs": [%s]}]}}]}'
    tokens = b'{"token": " Yes.", "logprob": 0}, {"token": "yes", "logprob": -0.6931471805599453}'
    assert first_token(read_answer(reported % tokens)) == pytest.approx({"yes": 1.5})
    for token in (b'{"token": 3, "logprob": 0}', b'{"token": "a", "logprob": 1e9}', b'{"token": "a"}', b"3"):
        with pytest.raises(ValueError, match="is no token with its log-prob"):
            read_answer(reported % token)
    for body in (b"[]", b"{}", b'{"choices": []}', b'{"choices": {}}', b'{"choices": [{"message": "a"}]}'):
        with pytest.raises(PassingError, match="is no chat completion"):
            read_answer(body)


def test_mlflow_reads_no_charset_either(monkeypatch: pytest.MonkeyPatch) -> None:
    import requests
    from urllib3 import HTTPResponse

    monkeypatch.setattr(requests.adapters, "get_encoding_from_headers", requests.adapters.get_encoding_from_headers)
    open_client("store", "http://127.0.0.1:1")
    raw = HTTPResponse(body=io.BytesIO(b"no"), headers={"content-type": "text/plain; charset=punycode"}, status=400)
    answer = requests.adapters.HTTPAdapter().build_response(requests.Request("GET", "http://x").prepare(), raw)
    assert answer.encoding == "utf-8"


def test_prefect_refuses_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_CLIENT_MAX_RETRIES", "0")
    with saying(500, "undefined", b"\xff no") as url, pytest.raises(ConfigError, match="� no"):
        prefect(url)
