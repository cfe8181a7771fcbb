"""Sockets of a tree of processes, and their answers to foreign requests: from other pages, by another name."""

from __future__ import annotations

import contextlib
import http.client
import socket
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import psutil

#: Requests that a server on this machine must refuse, by what they are.
_FOREIGN = {
    "another name": {"Host": "evil.example:{port}"},
    "another name and its page": {"Host": "evil.example:{port}", "Origin": "http://evil.example:{port}"},
    "a page elsewhere": {"Origin": "http://evil.example"},
    "a page of another local port": {"Origin": "http://localhost:1"},
    "a part of a page elsewhere": {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
}
_WEBSOCKET = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
}
#: Seconds within which a server of HTTP answers; sockets of several other protocols stay silent.
_ANSWERED_S = 3.0


@dataclass(frozen=True, slots=True, order=True)
class Listener:
    """A socket that listens, and the command line of its process."""

    ip: str
    port: int
    command: str


def listeners(pid: int) -> set[Listener]:
    """Return the TCP sockets that listen in a process and its descendants."""
    found: set[Listener] = set()
    with contextlib.suppress(psutil.NoSuchProcess):
        top = psutil.Process(pid)
        for process in [top, *top.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                command = " ".join(process.cmdline())[:300]
                for each in process.net_connections("tcp"):
                    if each.status == psutil.CONN_LISTEN:
                        found.add(Listener(each.laddr.ip, each.laddr.port, command))
    return found


def served(found: Iterable[Listener]) -> list[Listener]:
    """Return the sockets that answer HTTP; those of other protocols answer something else, or nothing."""
    asked = list(found)
    with ThreadPoolExecutor(16) as pool:
        statuses = list(pool.map(lambda each: _status(each, {}), asked))
    return [each for each, status in zip(asked, statuses, strict=True) if status is not None]


def lets_in(listener: Listener, path: str = "/") -> list[str]:
    """Return the foreign requests that a server of HTTP does not refuse with 403. Of MLflow's those by another name:
    it refuses pages elsewhere by CORS, and only where a request changes something."""
    wrong = []
    for label, headers in _FOREIGN.items():
        if "mlflow" in listener.command and "Host" not in headers:
            continue
        filled = {name: value.format(port=listener.port) for name, value in headers.items()}
        for kind, more in (("page", {}), ("websocket", _WEBSOCKET)):
            status = _status(listener, {**filled, **more}, path)
            if status != http.client.FORBIDDEN:
                wrong.append(f"{listener} answers {label}, as a {kind}, with {status}")
    return wrong


def _status(listener: Listener, headers: dict[str, str], path: str = "/") -> int | None:
    """Return the status of an answer; None without one."""
    lines = {"Host": f"127.0.0.1:{listener.port}", "Connection": "close", **headers}
    request = "".join([f"GET {path} HTTP/1.1\r\n", *(f"{name}: {value}\r\n" for name, value in lines.items()), "\r\n"])
    try:
        with socket.create_connection((listener.ip, listener.port), _ANSWERED_S) as connection:
            connection.sendall(request.encode())
            head = connection.recv(64)
    except OSError:
        return None
    return int(head.split()[1]) if head.startswith(b"HTTP/") else None
