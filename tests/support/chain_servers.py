"""A server of SGLang's protocol in a thread of the test: it draws with a policy of its own noise, lies on request, and
loads weights from folders."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import uvicorn
from fastapi import FastAPI, Request, Response
from safetensors.torch import load_file, save

from flowmill.configs.load import load_config
from flowmill.models.engines.chains import DenoisingChain
from flowmill.models.engines.sglang_wire import FROM_DISK, GENERATE
from flowmill.models.maths.conditioning import Conditioning
from flowmill.models.maths.sampling import Sampler, sample
from flowmill.models.maths.schedules import Steps
from flowmill.models.maths.solvers import Euler
from flowmill.models.maths.transitions import ODE, FlowSDE
from flowmill.models.policies.diffusion import TrainableDenoiser
from flowmill.models.serving import messages
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.artifacts.lineage import RunFolder
from flowmill.tasks.execution.session import Session
from flowmill.tasks.inputs.prompts import Prompt, uses_guidance
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runs.seeds import derive, generator
from flowmill.tasks.specs.plan import RunPlan


@dataclass
class ChainServer:
    """A server; ``lie`` changes its chains."""

    config: Path
    overrides: tuple[str, ...] = ()
    token: str | None = None
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    loads: bool = True
    lie: Callable[[DenoisingChain], DenoisingChain] = lambda chain: chain

    def __post_init__(self) -> None:
        config = load_config(self.config, list(self.overrides))
        store = ArtifactStore(config.store)
        self._host = Session(RunContext(store, config, RunFolder(store, "server"))).host
        self._kind, self._lock = RunPlan(config).modality, threading.Lock()
        self.held = cast(TrainableDenoiser, self._host.fresh())

    def load(self, body: Mapping[str, Any]) -> None:
        """Load whole denoisers; adapters are merged into these."""
        for name in body["target_modules"]:
            files = sorted((Path(body["model_path"]) / name).glob("*.safetensors"))
            stored = {key: value for file in files for key, value in load_file(file).items()}
            self.held.policy.trained[name].load_state_dict(stored)
        self.held.changed()
        self.loaded.append(body["model_path"])

    def draw(self, body: Mapping[str, Any]) -> DenoisingChain:
        """Return the chain of a request, all of whose noise follows from its seed."""
        with self._lock, torch.no_grad():
            self._host.use_threads()
            self.requests.append(dict(body))
            policy, steps, states = self.held.policy, body["num_inference_steps"], body["rollout_return_step_indices"]
            stochastic = tuple(body["rollout_sde_step_indices"])
            latents, sigmas = policy.initial_latents([generator(body["seed"])]), policy.sigmas(steps)
            kernel = FlowSDE(noise_level=body["rollout_noise_level"]) if stochastic else ODE()
            rollout = sample(
                self.held,
                self._conditioning(body["prompt"]),
                latents,
                sigmas,
                sampler=Sampler(kernel=kernel, solver=Euler()),
                plans=[Steps(stochastic=stochastic, trained=stochastic, kept=tuple(range(steps + 1)))],
                noise=lambda step: self._noise(body["seed"], step, latents),
            )
        assert rollout.states is not None
        log_probs = torch.zeros(steps)
        log_probs[list(stochastic)] = rollout.log_probs[0]
        chain = DenoisingChain(
            latents=rollout.states[0, states], states=tuple(states), sigmas=sigmas, log_probs=log_probs
        )
        return self.lie(chain)

    @staticmethod
    def _noise(seed: int, step: int, like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=generator(derive(seed, "noise", step)))

    def _conditioning(self, prompt: str) -> Conditioning:
        config = self._host.config
        texts = [prompt, *([config.model.negative_prompt] if uses_guidance(config) else [])]
        rows = [self._kind.encode(self._host, [Prompt(text=text)]) for text in texts]
        return Conditioning(*rows)


def packed(chain: DenoisingChain) -> bytes:
    """Return the body of an answer."""

    def tensor(value: torch.Tensor) -> dict[str, Any]:
        data = base64.b64encode(save({"t": value.contiguous()})).decode()
        return {"__tensor__": True, "data": data, "shape": list(value.shape), "dtype": str(value.dtype)}

    trajectory = {
        "latents": tensor(chain.latents),
        "timesteps": tensor(chain.sigmas * 1000),
        "sigmas": tensor(chain.sigmas),
        "latent_step_indices": tensor(torch.tensor(chain.states)),
    }
    return messages.pack([{"dit_trajectory": trajectory, "rollout_log_probs": tensor(chain.log_probs)}])


def app_of(server: ChainServer) -> FastAPI:
    """Return the routes of SGLang's server that a run uses."""
    app = FastAPI()

    @app.middleware("http")
    async def authorized(request: Request, follow: Any) -> Response:
        if server.token is not None and request.headers.get("authorization") != f"Bearer {server.token}":
            return Response("the token is missing or wrong", 401)
        found: Response = await follow(request)
        return found

    @app.post(FROM_DISK)
    def from_disk(body: dict[str, Any]) -> dict[str, Any]:
        server.load(body)
        return {"success": server.loads, "message": ""}

    @app.post(GENERATE)
    def generate(body: dict[str, Any]) -> Response:
        return Response(packed(server.draw(body)), media_type=messages.TYPE)

    return app


@contextmanager
def chain_server(config: Path, *overrides: str, token: str | None = None) -> Iterator[ChainServer]:
    """Serve the policy of a config on a free port of this machine inside."""
    found = ChainServer(config, overrides, token)
    server = uvicorn.Server(uvicorn.Config(app_of(found), host="127.0.0.1", port=0, log_level="warning"))
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
