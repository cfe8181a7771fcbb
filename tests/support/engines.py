"""A server of OpenAI's completions for tests: it draws with a model of ours, and lies on request."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from flowmill.models.maths.tokens import Widths, token_log_probs
from flowmill.models.policies.base import PolicySettings
from flowmill.models.policies.causal_lm import CausalLM
from flowmill.models.policies.parts import Part


class Engine(ThreadingHTTPServer):
    """Completes prompts of token ids; ``lie`` changes an answer, or gives bytes that are sent as they are."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.loaded: list[dict[str, Any]] = []
        self.faults: list[int] = []
        self.lie: Callable[[dict[str, Any]], Any] = lambda answer: answer
        self.drip_s = 0.0
        self.lock = threading.Lock()
        self.load(folder)

    def load(self, folder: Path) -> None:
        self.policy = CausalLM.load(folder, PolicySettings(), frozenset({Part.DENOISER}), {})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    @property
    def reload_url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/reload"

    @torch.no_grad()
    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        prompt: list[int] = asked["prompt"]
        ids, log_probs = list(prompt), list[float]()
        generator = torch.Generator().manual_seed(asked["seed"])
        while len(log_probs) < asked["max_tokens"]:
            logits = self._logits(ids)[len(ids) - 1]
            log_p = torch.log_softmax(logits / asked["temperature"], -1)
            token = int(torch.multinomial(log_p.exp(), 1, generator=generator))
            ids.append(token)
            log_probs.append(float(log_p[token]))
            text = self.policy.tokenizer.decode(ids[len(prompt) :], skip_special_tokens=True)
            if token in asked.get("stop_token_ids", []) or any(each in text for each in asked.get("stop", [])):
                break
        choice: dict[str, Any] = {"index": 0, "text": "?", "finish_reason": "length"}
        choice["logprobs"] = {"token_logprobs": log_probs, "tokens": ["?"] * len(log_probs)}
        if asked.get("return_token_ids"):
            choice |= {"token_ids": ids[len(prompt) :], "prompt_token_ids": prompt}
        said = [None, *self.log_probs(prompt)[1:]]
        if asked.get("echo"):
            choice["logprobs"]["token_logprobs"] = [*said, *log_probs]
        if asked.get("prompt_logprobs") is not None:
            reported = [{str(token): {"logprob": each}} for token, each in zip(prompt[1:], said[1:], strict=True)]
            choice["prompt_logprobs"] = [None, *reported]
        return {"object": "text_completion", "model": asked["model"], "choices": [choice]}

    def log_probs(self, ids: Sequence[int]) -> list[float]:
        row = torch.tensor([ids])
        found: list[float] = token_log_probs(self._logits(ids)[None, : len(ids)], row, 1.0)[0].tolist()
        return found

    def _logits(self, ids: Sequence[int]) -> torch.Tensor:
        row = torch.zeros(1, Widths().of(len(ids)), dtype=torch.int64)
        row[0, : len(ids)] = torch.tensor(ids)
        return self.policy.forward(row).logits[0].float()


class _Handler(BaseHTTPRequestHandler):
    server: Engine

    def log_message(self, format: str, *args: Any) -> None:
        return

    def do_GET(self) -> None:
        status = self.server.faults.pop(0) if self.server.faults else 200
        self.send_response(status)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            status = server.faults.pop(0) if server.faults else 200
            found: Any = {"error": {"message": "not now"}}
            if status == 200 and self.path == "/reload":
                server.loaded.append({**asked, "key": self.headers.get("Authorization")})
                server.load(Path(asked["path"]))
                found = {}
            elif status == 200:
                server.requests.append(asked)
                server.keys.append(self.headers.get("Authorization"))
                found = server.lie(server.answer(asked))
        data = found if isinstance(found, bytes) else json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        with suppress(OSError):
            if server.drip_s:
                for at in range(len(data)):
                    self.wfile.write(data[at : at + 1])
                    time.sleep(server.drip_s)
            else:
                self.wfile.write(data)


@contextmanager
def engine_of(folder: Path) -> Iterator[Engine]:
    """Serve a model of a folder on a free port of this machine inside."""
    server = Engine(folder)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
