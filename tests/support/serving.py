"""Servers of commands for tests: real processes, and a proxy that spoils what they answer."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[2]


@dataclass
class Server:
    """A ``flowmill serve-reward`` of one reward, or another command that serves, at a fixed port."""

    arguments: Sequence[str]
    port: int = 0
    environment: dict[str, str] | None = None
    name: str = "serve-reward"
    organizer: str = ""
    """Address of the page of the one who serves ratings."""
    _process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, and wait until it answers; once started it keeps its port."""
        command = [sys.executable, "-m", "flowmill.flows.cli", self.name, *self.arguments, "--port", str(self.port)]
        path = os.pathsep.join(filter(None, [(self.environment or {}).get("PYTHONPATH"), str(ROOT)]))
        environment = {**os.environ, **(self.environment or {}), "PYTHONPATH": path}
        self._process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("the organizer's page answers at "):
                self.organizer = line.split()[-1]
            elif "answers at" in line:
                self.port = int(line.strip().rpartition(":")[2].partition("/")[0])
                return
        raise AssertionError(f"the server ended with {self._process.wait()}")

    def kill(self) -> None:
        """Kill it with no chance to say goodbye."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextlib.contextmanager
def served(*arguments: str, **environment: str) -> Iterator[Server]:
    """Run a server of a reward, given as on the command line."""
    server = Server(arguments, environment=environment)
    server.start()
    try:
        yield server
    finally:
        server.kill()


@contextlib.contextmanager
def answering(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """Answer every request by a function, which writes the response; give the address."""

    class Handler(BaseHTTPRequestHandler):
        def respond(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            with contextlib.suppress(OSError):
                answer(self)

        do_GET = do_POST = respond

        def log_message(self, *arguments: object) -> None:
            pass

    with _listening(Handler) as url:
        yield url


@contextlib.contextmanager
def _listening(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def spoiling(url: str, spoil: Callable[[int, bytes], bytes | None]) -> Iterator[str]:
    """Stand before a server and spoil its answers.

    Args:
        url: of the server.
        spoil: number of the answered POST and its body -> what is sent instead, of the length that was announced for
            the whole; None: the connection is cut.
    """
    counter = iter(range(1_000_000))
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._pass_on("GET", None)

        def do_POST(self) -> None:
            self._pass_on("POST", self.rfile.read(int(self.headers["content-length"])))

        def _pass_on(self, method: str, body: bytes | None) -> None:
            names = ("content-type", "x-flowmill-xxh3", "x-flowmill-reward", "authorization")
            headers = {name: self.headers[name] for name in names if name in self.headers}
            try:
                answer = httpx.request(method, f"{url}{self.path}", content=body, headers=headers, timeout=60)
            except httpx.TransportError:
                self.send_error(502)
                return
            content: bytes | None = answer.content
            if method == "POST":
                with lock:
                    number = next(counter)
                content = spoil(number, answer.content)
            if content is None:
                self.connection.close()
                return
            self.send_response(answer.status_code)
            for name in ("content-type", "x-flowmill-xxh3"):
                if name in answer.headers:
                    self.send_header(name, answer.headers[name])
            self.send_header("content-length", str(len(answer.content)))
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(content)

        def log_message(self, *arguments: object) -> None:
            pass

    with _listening(Handler) as proxied:
        yield proxied
