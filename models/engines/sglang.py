"""SGLang's diffusion servers, which draw chains of denoisers over HTTP."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import Field, NonNegativeFloat, PositiveFloat

from flowmill.configs.addresses import token_of
from flowmill.configs.answers import json_of
from flowmill.configs.errors import EngineError
from flowmill.configs.schema import RolloutSection
from flowmill.configs.user_directories import user_path
from flowmill.models.engines import sglang_wire
from flowmill.models.engines.answers import Malformed
from flowmill.models.engines.chains import ChainRequest, DenoisingChain, Drawing, Sde
from flowmill.models.engines.openai import write_once
from flowmill.models.engines.parallel import mapped
from flowmill.models.serving import messages
from flowmill.models.serving.retry import PassingError, Patience
from flowmill.models.serving.server_client import RefusedError, ServerClient

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")
#: Maximum bytes of an answer, and additional bytes per number of its latents: float32 in base64.
_MOST, _MOST_PER_NUMBER = 1 << 20, 6
_AGAIN = "Committed results stay, and nothing of this batch was stored: give the same command again."


@dataclass(kw_only=True)
class SGLang:
    """SGLang's diffusion servers (`sglang serve`): they draw with their own kernels and noise, and load the weights
    from a folder."""

    servers: Annotated[
        tuple[Annotated[str, Field(pattern="^https?://")], ...],
        Field(min_length=1),
        "Give the address of a server; addresses begin with http:// or https://.",
    ]
    """Addresses; each rank uses one of them, in turn."""
    folder: str | None = None
    """Where the denoisers are written before a rollout, adapters merged: a place shared with the servers. Without it
    you load the weights."""
    timeout_s: PositiveFloat = 600.0
    """Seconds for a request and its whole answer."""
    patience_s: NonNegativeFloat = 120.0
    """Seconds of failures of a server, which are retried, after which the run stops."""
    tolerance: PositiveFloat | None = None
    """Relative distance of velocities from the policy's above which samples are refused; when absent 1e-3 in float32,
    else 0.05."""
    log_prob_tolerance: PositiveFloat = 1e-3
    """Mean distance of log-probs from the policy's, per latent, above which samples are refused."""

    def reach(self) -> None:
        """Wait until every server answers; raise EngineError for the first that does not."""
        for url in self.servers:
            client = ServerClient(Patience(self.patience_s), timeout_s=self.timeout_s, concurrency=1, base_url=url)
            try:
                client.send("GET", "/health", lambda answer: None, most=_MOST)
            except RefusedError as refused:
                # A refusal, without the token or of the path, is an answer.
                if not refused.status:
                    raise EngineError(f"rollout.engine at {url}: the address {refused.detail.rstrip('.')}.") from None
            except PassingError as error:
                raise EngineError(self.silence(url, error)) from None

    def silence(self, url: str, error: PassingError) -> str:
        """Return the message that a server does not answer."""
        return (
            f"rollout.engine at {url} has not answered for {self.patience_s:g} s; the last: {error}. See that the "
            f"server runs there ('sglang serve --model-path FOLDER'), or change the option 'servers'. {_AGAIN}"
        )

    def lacks(self, section: RolloutSection, sde: Sde) -> str | None:
        """Return why it cannot draw the chains of a rollout, and a remedy."""
        if sde.kind not in ("sde", "cps", "ode"):
            return f"it has no rollout.sampler '{sde.kind}'. Set that to 'flow_sde' or 'cps'."
        if section.solver != "euler":
            return f"it has no rollout.solver '{section.solver}'. Set that to 'euler'."
        if section.same_noise:
            return "it draws the start and all noise of a chain from one seed. Set rollout.same_noise to false."
        return None

    def open(self, drawing: Drawing) -> SGLangServer:
        """Return the server of a rank; no request is sent yet."""
        return SGLangServer(self, self.servers[drawing.rank % len(self.servers)], drawing)


class SGLangServer:
    """One server of a rollout."""

    def __init__(self, engine: SGLang, url: str, drawing: Drawing) -> None:
        self._engine, self.url, self._drawing = engine, url, drawing
        self._patience = Patience(engine.patience_s)
        token = token_of(sglang_wire.TOKEN)
        # A retry proves the weights again, so that of a single request would be too early.
        self._client = ServerClient(
            Patience(0),
            timeout_s=engine.timeout_s,
            concurrency=drawing.call.batch_size,
            base_url=url,
            headers={} if token is None else {"authorization": f"Bearer {token}"},
        )
        self._proved = False

    def chains(self, requests: Sequence[ChainRequest]) -> list[DenoisingChain]:
        """Return chains, one request each, all at once; raise EngineError if the server does not answer for a while, or
        its answers cannot be used."""
        try:
            return self._patience.again(lambda: self._drawn(requests))
        except PassingError as error:
            raise EngineError(self._engine.silence(self.url, error)) from None

    def _drawn(self, requests: Sequence[ChainRequest]) -> list[DenoisingChain]:
        if not self._proved:
            if self._engine.folder is not None:
                self._load(Path(self._engine.folder))
            self._drawing.prove(self.url, self._chain(self._drawing.proof))
            self._proved = True
        return mapped(self._chain, requests, len(requests))

    def _load(self, folder: Path) -> None:
        """Write the denoisers into the folder, and have the server load them."""
        target = user_path(folder).absolute() / f"policy-{self._drawing.weights.name}"
        try:
            write_once(target, self._drawing.weights.write)
        except OSError as error:
            raise EngineError(
                f"rollout.engine: the policy cannot be written into its option 'folder', '{folder}': {error}. "
                f"Choose another folder, which the servers can read too. {_AGAIN}"
            ) from None
        modules = sorted(path.name for path in target.iterdir() if path.is_dir())
        body = {"model_path": str(target), "target_modules": modules}
        if (
            self._send(sglang_wire.FROM_DISK, lambda answer: _json(answer).get("success"), most=_MOST, json=body)
            is not True
        ):
            raise EngineError(f"{self._place} did not load the weights of the policy. See its log. {_AGAIN}")

    def _chain(self, request: ChainRequest) -> DenoisingChain:
        call = self._drawing.call

        def read(answer: httpx.Response) -> DenoisingChain:
            try:
                return sglang_wire.chain_of(answer.content, call, request)
            except messages.WireError as error:
                raise PassingError(f"its answer is malformed: {error}") from None

        # Servers that do not know which states were requested return all.
        most = _MOST + _MOST_PER_NUMBER * (call.steps + 2) * math.prod(call.shape)
        return self._send(sglang_wire.GENERATE, read, most=most, json=sglang_wire.request_of(call, request))

    @property
    def _place(self) -> str:
        return f"rollout.engine at {self.url}"

    def _send(self, path: str, read: Callable[[httpx.Response], T], *, most: int, **more: Any) -> T:
        try:
            return self._client.send("POST", path, read, most=most, **more)
        except PassingError:
            # It may have been started again, without the weights.
            self._proved = False
            raise
        except Malformed as error:
            raise EngineError(f"{self._place} gave an answer that cannot be used: {error} {_AGAIN}") from None
        except RefusedError as refused:
            said = f"refuses ({refused})" if refused.status else f"the address {refused.detail}"
            raise EngineError(f"{self._place}: {said.rstrip('.')}. {_AGAIN}") from None


def _json(answer: httpx.Response) -> dict[str, Any]:
    try:
        content = json_of(answer.content)
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise PassingError("its answer is no JSON object")
    return content
