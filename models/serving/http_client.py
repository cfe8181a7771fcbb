"""HTTP clients with a deadline for a whole response and a limit of its size, as protection from faulty servers.

Usual timeouts apply to a single read, and usual size limits to compressed bytes; servers that drip or gzip bombs pass
both. Text is decoded as UTF-8, regardless of headers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import httpcore
import httpx

from flowmill.configs.answers import read_as_utf8

#: Extension of a request: the maximum bytes of its response.
MOST = "flowmill.most"
#: Extension of a response: the deadline for reading it, by the monotonic clock.
UNTIL = "flowmill.until"
#: Maximum bytes of the response to a request without ``MOST``.
_MOST = 1 << 24


def bounded_client(total_s: float, **how: Any) -> httpx.Client:
    """Return a client whose requests end after some seconds, however slow the server is."""
    clock = _Clock(total_s)
    client = httpx.Client(**how, event_hooks={"request": [clock.start], "response": [read_as_utf8, clock.watch]})
    for transport in (client._transport, *client._mounts.values()):
        pool = getattr(transport, "_pool", None)
        if pool is not None:
            pool._network_backend = _Backend(pool._network_backend, clock)
    return client


class _Clock(threading.local):
    """The deadline of this thread's current request."""

    def __init__(self, total_s: float) -> None:
        self._total_s = total_s
        self._until = float("inf")

    def start(self, request: httpx.Request) -> None:
        request.headers["accept-encoding"] = "identity"
        self._until = time.monotonic() + self._total_s

    def watch(self, response: httpx.Response) -> None:
        most = int(response.request.extensions.get(MOST, _MOST))
        response.extensions[UNTIL] = self._until
        encoding = response.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            raise httpx.RemoteProtocolError(f"the answer is compressed ({encoding[:40]!r}), which was not asked for")
        length = response.headers.get("content-length", "")
        if length.isdecimal() and (len(length) > 18 or int(length) > most):
            raise httpx.RemoteProtocolError(f"the answer has {length[:30]} bytes, more than the {most} it may have")
        if isinstance(response.stream, httpx.SyncByteStream):
            response.stream = _Stream(response.stream, most, self)

    def left(self, timeout: float | None) -> float:
        """Return the seconds left, at most ``timeout``; raise ``httpcore.ReadTimeout`` if there are none."""
        left = self._until - time.monotonic()
        if left <= 0:
            raise httpcore.ReadTimeout(f"the answer was not complete after {self._total_s:g} s")
        return left if timeout is None else min(timeout, left)


class _Stream(httpx.SyncByteStream):
    def __init__(self, inner: httpx.SyncByteStream, most: int, clock: _Clock) -> None:
        self._inner, self._most, self._clock = inner, most, clock

    def __iter__(self) -> Iterator[bytes]:
        size = 0
        for part in self._inner:
            size += len(part)
            if size > self._most:
                raise httpx.RemoteProtocolError(f"the answer has more than the {self._most} bytes it may have")
            yield part

    def close(self) -> None:
        self._inner.close()


class _Socket(httpcore.NetworkStream):
    def __init__(self, inner: httpcore.NetworkStream, clock: _Clock) -> None:
        self._inner, self._clock = inner, clock

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._inner.read(max_bytes, self._clock.left(timeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._inner.write(buffer, self._clock.left(timeout))

    def close(self) -> None:
        self._inner.close()

    def start_tls(self, *args: Any, **more: Any) -> httpcore.NetworkStream:
        return _Socket(self._inner.start_tls(*args, **more), self._clock)

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


class _Backend(httpcore.NetworkBackend):
    def __init__(self, inner: httpcore.NetworkBackend, clock: _Clock) -> None:
        self._inner, self._clock = inner, clock

    def connect_tcp(
        self, host: str, port: int, timeout: float | None = None, *args: Any, **more: Any
    ) -> httpcore.NetworkStream:
        return _Socket(self._inner.connect_tcp(host, port, self._clock.left(timeout), *args, **more), self._clock)

    def sleep(self, seconds: float) -> None:
        self._inner.sleep(seconds)
