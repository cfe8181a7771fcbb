"""Local servers answer programs and their own pages, and no page of another origin."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest

from flowmill.tasks.execution.guard import OwnPagesOnly, Scope


def answer(kind: str = "http", method: str = "GET", **headers: str) -> list[MutableMapping[str, Any]]:
    """Return what is sent for a request with some headers, their underscores being hyphens."""
    sent: list[MutableMapping[str, Any]] = []

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"X-Frame-Options", b"ALLOWALL")]})

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    async def receive() -> MutableMapping[str, Any]:
        return {}

    given = {"host": "127.0.0.1:4200", **{name.replace("_", "-"): value for name, value in headers.items()}}
    pairs = [(name.encode(), value.encode()) for name, value in given.items()]
    asyncio.run(OwnPagesOnly(app)({"type": kind, "method": method, "headers": pairs}, receive, send))
    return sent


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"host": "localhost:4200"},
        {"host": "[::1]:4200"},
        {"origin": "http://127.0.0.1:4200"},
        {"origin": "http://localhost:4200"},
        {"sec_fetch_site": "same-origin"},
        {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate", "sec_fetch_dest": "document"},
    ],
)
def test_programs_own_pages_and_followed_links_are_answered(headers: dict[str, str]) -> None:
    (start,) = answer(**headers)
    assert start["status"] == 200
    assert start["headers"] == [(b"x-frame-options", b"SAMEORIGIN")], "no page shows it as a part of itself"


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "http://evil.example:4200"},
        {"origin": "http://localhost:8888"},
        {"origin": "http://127.0.0.1:4200@evil.example"},
        {"origin": "http://127.0.0.1.evil.example:4200"},
        {"origin": "http://[broken"},
        {"origin": "null"},
        {"host": "evil.example"},
        {"host": "10.evil.example:4200"},
        {"host": "evil.example:4200", "origin": "http://evil.example:4200"},
        {"host": ""},
        {"sec_fetch_site": "cross-site", "sec_fetch_mode": "no-cors", "sec_fetch_dest": "script"},
        {"sec_fetch_site": "same-site", "sec_fetch_mode": "navigate", "sec_fetch_dest": "iframe"},
    ],
)
def test_pages_of_another_origin_and_names_that_lead_here_are_refused(headers: dict[str, str], method: str) -> None:
    start, body = answer(method=method, **headers)
    assert (start["status"], b"no page" in body["body"] or b"127.0.0.1" in body["body"]) == (403, True)
    assert not [name for name, _ in start["headers"] if name.startswith(b"access-control")]
    (closed,) = answer("websocket", method, **headers)
    assert closed["type"] == "websocket.close"


def test_a_form_of_another_page_is_no_followed_link() -> None:
    seen = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate", "sec_fetch_dest": "document"}
    assert answer(method="POST", **seen)[0]["status"] == 403
