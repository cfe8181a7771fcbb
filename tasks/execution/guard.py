"""Local servers answer this machine's programs and their own pages, and no page of another origin.

A web page anywhere can have a browser send requests to 127.0.0.1, and by a name of its own that leads there (DNS
rebinding) read the answers. Prefect's server lets any origin read and any host name in; MLflow's lets pages of other
local servers in. Both are served through this middleware. Programs send neither header that is looked at.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

#: Names that lead to this machine whatever a name server says.
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
#: What a browser says of requests of the server's own pages, and of addresses that a person entered.
_OWN_SITE = ("same-origin", "none")
_POLICY_VIOLATION = 1008


class OwnPagesOnly:
    """An ASGI application that refuses what pages of other origins ask of another."""

    def __init__(self, app: App) -> None:
        """Guard an application."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it before the application sees it."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        why = refusal(scope)
        if why is not None:
            await _refuse(scope, send, why)
            return

        async def framed(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = _unframed(message.get("headers", ()))
            await send(message)

        await self._app(scope, receive, framed)


def refusal(scope: Scope) -> str | None:
    """Return why a request is not for this server, or comes from another's page; None if neither."""
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope.get("headers", ())}
    host = _place(f"http://{headers.get('host', '')}")
    if host is None or host[0] not in _LOOPBACK:
        return "This server answers at 127.0.0.1 and localhost alone, not by another name."
    origin = headers.get("origin")
    if origin is not None:
        # 127.0.0.1 and localhost at one port are one server.
        page = _place(origin)
        own = page is not None and page[0] in _LOOPBACK and page[1] == host[1]
        return None if own else "This server answers no page of another origin."
    if headers.get("sec-fetch-site", "none") in _OWN_SITE or _is_followed_link(scope, headers):
        return None
    return "This server answers no page of another origin."


def _is_followed_link(scope: Scope, headers: dict[str, str]) -> bool:
    """Return whether a person opens a page in a tab: the page they come from sees nothing of it."""
    seen = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    return seen and scope.get("method") == "GET"


def _place(url: str) -> tuple[str, int | None] | None:
    """Return the host and port of an address, None if it is none."""
    try:
        parts = urlsplit(url)
        return (parts.hostname, parts.port) if parts.hostname and "@" not in parts.netloc else None
    except ValueError:
        return None


def _unframed(headers: Any) -> list[tuple[bytes, bytes]]:
    """Return headers of an answer that no page of another origin can show as a part of itself."""
    kept = [(name, value) for name, value in headers if name.lower() != b"x-frame-options"]
    return [*kept, (b"x-frame-options", b"SAMEORIGIN")]


async def _refuse(scope: Scope, send: Send, why: str) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": why})
        return
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"x-content-type-options", b"nosniff")]
    await send({"type": "http.response.start", "status": 403, "headers": headers})
    await send({"type": "http.response.body", "body": f"{why}\n".encode()})
