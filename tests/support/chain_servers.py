"""A ``serve-rollout`` in a thread of the test, which lies on request, and loads weights from folders as SGLang does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from safetensors.torch import load_file

from models.engines.chain_wire import FROM_DISK, ChainRequest
from models.engines.chains import Chain
from models.engines.rollout_service import DrawsChains, make_app
from tasks.execution.serve_rollout import ServeRolloutRequest, served_policy


@dataclass
class ChainServer:
    """A server; ``lie`` changes its chains, ``brought`` counts the policies it took."""

    policy: DrawsChains
    url: str = ""
    requests: list[ChainRequest] = field(default_factory=list)
    brought: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    loads: bool = True
    lie: Callable[[list[Chain]], list[Chain]] = lambda chains: chains

    def __post_init__(self) -> None:
        draw, bring = self.policy.draw, self.policy.bring

        def drawn(requests: Sequence[ChainRequest]) -> list[Chain]:
            self.requests += requests
            return self.lie(draw(requests))

        def taken(name: str, tensors: object, *, last: bool) -> None:
            bring(name, tensors, last=last)  # type: ignore[arg-type]
            self.brought += [name] if last else []

        self.policy.draw, self.policy.bring = drawn, taken  # type: ignore[method-assign]


@contextmanager
def chain_server(config: Path, *overrides: str, token: str | None = None) -> Iterator[ChainServer]:
    """Serve the policy of a config on a free port of this machine inside."""
    found = ChainServer(served_policy(ServeRolloutRequest(config=str(config), overrides=list(overrides))))
    app = make_app(found.policy, token=token)

    @app.post(FROM_DISK)
    def from_disk(body: dict[str, Any]) -> dict[str, Any]:
        """Load whole denoisers, as SGLang does."""
        held = found.policy._held  # type: ignore[attr-defined]
        for name in body["target_modules"]:
            files = sorted((Path(body["model_path"]) / name).glob("*.safetensors"))
            stored = {key: value for file in files for key, value in load_file(file).items()}
            held.policy.trained[name].load_state_dict(stored)
        found.loaded.append(body["model_path"])
        return {"success": found.loads, "message": ""}

    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    found.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    try:
        yield found
    finally:
        server.should_exit = True
        thread.join()
