"""Requests to one server, shared by reward servers, judges and engines: bounded, and retried while the server fails."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import httpx

from flowmill.configs.addresses import token_of
from flowmill.configs.answers import json_of, text_of
from flowmill.models.serving.http_client import MOST, bounded_client
from flowmill.models.serving.retry import PassingError, Patience

T = TypeVar("T")
#: Seconds to wait for a connection.
_CONNECT_S = 5.0
#: Status codes that call for a retry, in addition to those from 500 on.
_LATER = frozenset({408, 425, 429})
#: Headers of OpenAI's protocol and their environment variables, in addition to the key.
_OPENAI = {"openai-organization": "OPENAI_ORG_ID", "openai-project": "OPENAI_PROJECT_ID"}


class RefusedError(Exception):
    """A refusal that no retry cures."""

    def __init__(self, status: int, detail: str, cause: str = "") -> None:
        """Bind to the status code, 0 if the address cannot be used, the reason, and the field ``cause`` of a
        reward server's answer."""
        super().__init__(f"{status}: {detail}" if status else detail)
        self.status, self.detail, self.cause = status, detail, cause


class ServerClient:
    """A client of one server, for several threads."""

    def __init__(self, patience: Patience, *, timeout_s: float, concurrency: int, **how: Any) -> None:
        """Make the client; no request is sent yet. ``timeout_s``: seconds for a request and its whole response;
        ``how``: see ``httpx.Client``."""
        self.patience = patience
        self._slots = threading.BoundedSemaphore(concurrency)
        self._client = bounded_client(
            timeout_s,
            timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, _CONNECT_S)),
            limits=httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency),
            **how,
        )

    def send(self, method: str, url: str, read: Callable[[httpx.Response], T], *, most: int, **more: Any) -> T:
        """Return the parsed response to a request. Raises PassingError, the last failure, after all retries;
        RefusedError if the server refuses, or the address is invalid. ``read``: parses the response; a ``PassingError``
        that it raises calls for a retry; ``most``: maximum bytes of the response."""
        return self.patience.again(lambda: read(self._sent(method, url, {MOST: most}, **more)))

    def _sent(self, method: str, url: str, extensions: dict[str, Any], **more: Any) -> httpx.Response:
        try:
            with self._slots:
                answer = self._client.request(method, url, extensions=extensions, **more)
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise RefusedError(0, f"cannot be used: {error}") from None
        except (httpx.TransportError, httpx.DecodingError) as error:
            raise PassingError(f"{type(error).__name__}: {error}") from None
        status = answer.status_code
        if status in _LATER or status >= httpx.codes.INTERNAL_SERVER_ERROR:
            after = answer.headers.get("retry-after", "")
            raise PassingError(f"it answers {status}: {_detail(answer)}", float(after) if after.isdecimal() else 0.0)
        if not answer.is_success:
            raise RefusedError(status, _detail(answer), _cause(answer))
        return answer


def openai_headers(key_variable: str) -> dict[str, str]:
    """Return the headers of a request in OpenAI's protocol; the key is that of an environment variable, if set. Raises
    ConfigError if no header can carry it."""
    values = {header: token_of(name) for header, name in _OPENAI.items()}
    headers = {header: value for header, value in values.items() if value is not None}
    key = token_of(key_variable)
    return headers if key is None else {**headers, "authorization": f"Bearer {key}"}


def _detail(answer: httpx.Response) -> str:
    try:
        content = json_of(answer.content)
    except ValueError:
        return text_of(answer.content).strip()[:200] or "nothing"
    for name in ("error", "message", "detail"):
        if isinstance(content, dict) and name in content:
            content = content[name]
    return str(content)[:2000]


def _cause(answer: httpx.Response) -> str:
    try:
        content = json_of(answer.content)
    except ValueError:
        return ""
    cause = content.get("cause") if isinstance(content, dict) else None
    return cause if isinstance(cause, str) else ""
