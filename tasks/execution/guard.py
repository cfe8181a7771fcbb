"""Guard for local servers: they answer programs on this machine and their own pages, but no page of another origin.

Any web page can make a browser send requests to 127.0.0.1, and read the responses through its own host name that
resolves to 127.0.0.1 (DNS rebinding). Prefect's server accepts any origin and any host name, so it runs behind this
middleware, as the explorer and servers of rewards and ratings without a token do. MLflow's server does not: it checks
host names itself, and accepts pages of other servers of this machine. Programs do not send the checked browser headers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from flowmill.configs.addresses import is_loopback, token_of
from flowmill.configs.errors import ConfigError
from flowmill.configs.escaping import quoted

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

#: Names of this machine that no name server can redirect.
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
#: Values of Sec-Fetch-Site for requests from the server's own pages, and for addresses that the user entered.
_OWN_SITE = ("same-origin", "none")
_POLICY_VIOLATION = 1008


class OwnPagesOnly:
    """An ASGI application that guards another one against requests from pages of other origins."""

    def __init__(self, app: App) -> None:
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


def access_token(host: str, variable: str, *, where: str) -> str | None:
    """Return the token that a server on ``host`` wants, from an environment variable; None: it wants none."""
    token = token_of(variable)
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"--host {quoted(host)} gives other machines access, but {variable} is not set. Set it here and {where}, "
            "or listen on 127.0.0.1 and forward the port."
        )
    return token


def refusal(scope: Scope) -> str | None:
    """Return the reason to refuse a request: another host name, or a page of another origin; None to accept it."""
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope.get("headers", ())}
    host = _place(f"http://{headers.get('host', '')}")
    if host is None or host[0] not in _LOOPBACK:
        return "This server answers at 127.0.0.1 and localhost alone, not by another name."
    origin = headers.get("origin")
    if origin is not None:
        # 127.0.0.1 and localhost with the same port are the same server.
        page = _place(origin)
        own = page is not None and page[0] in _LOOPBACK and page[1] == host[1]
        return None if own else "This server answers no page of another origin."
    if headers.get("sec-fetch-site", "none") in _OWN_SITE or _is_followed_link(scope, headers):
        return None
    return "This server answers no page of another origin."


def _is_followed_link(scope: Scope, headers: dict[str, str]) -> bool:
    """Return whether the user opens a page in a tab: the linking page cannot read it."""
    seen = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    return seen and scope.get("method") == "GET"


def _place(url: str) -> tuple[str, int | None] | None:
    """Return the host and port of a URL, None if it is invalid."""
    try:
        parts = urlsplit(url)
        return (parts.hostname, parts.port) if parts.hostname and "@" not in parts.netloc else None
    except ValueError:
        return None


def _unframed(headers: Any) -> list[tuple[bytes, bytes]]:
    """Return response headers that forbid pages of other origins to embed the response in a frame."""
    remaining = [(name, value) for name, value in headers if name.lower() != b"x-frame-options"]
    return [*remaining, (b"x-frame-options", b"SAMEORIGIN")]


async def _refuse(scope: Scope, send: Send, why: str) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": why})
        return
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"x-content-type-options", b"nosniff")]
    await send({"type": "http.response.start", "status": 403, "headers": headers})
    await send({"type": "http.response.body", "body": f"{why}\n".encode()})
