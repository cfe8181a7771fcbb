"""An endpoint that speaks OpenAI's chat protocol, for tests: its answers are set by the test."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Endpoint(ThreadingHTTPServer):
    """Answers chat requests as set by the test, and keeps them; first with ``faults``, statuses or bodies with 200."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.answer: Callable[[dict[str, Any]], dict[str, Any]] = lambda request: says("Final Score: 4")
        self.faults: list[int | bytes] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def log_message(self, format: str, *args: Any) -> None:
        return

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fault = self.server.faults.pop(0) if self.server.faults else 200
        status = 200 if isinstance(fault, bytes) else fault
        body: dict[str, Any] = {"error": {"message": "not now"}}
        if fault == 200:
            self.server.requests.append(request)
            self.server.keys.append(self.headers.get("Authorization"))
            body = {"id": "1", "object": "chat.completion", "created": 0, "model": request["model"]}
            body["choices"] = [self.server.answer(request)]
        data = fault if isinstance(fault, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("retry-after-ms", "1")
        self.end_headers()
        self.wfile.write(data)


def says(text: str, **tokens: float) -> dict[str, Any]:
    """One choice, with the probabilities of its first token if given."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
    if tokens:
        likely = [{"token": t, "logprob": math.log(p), "bytes": None, "top_logprobs": []} for t, p in tokens.items()]
        choice["logprobs"] = {"content": [{**likely[0], "top_logprobs": likely}], "refusal": None}
    return choice


@contextmanager
def serving() -> Iterator[Endpoint]:
    """Serve on a free port of this machine inside."""
    server = Endpoint()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
