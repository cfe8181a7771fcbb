"""Servers that draw chains of denoisers over HTTP: ``flowmill serve-rollout``, and SGLang's diffusion server."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from configs.answers import json_of
from configs.errors import EngineError
from configs.proxies import by_proxy
from configs.schema import RolloutSection
from models.engines import chain_wire
from models.engines.answers import Malformed
from models.engines.chains import Chain, Drawing, Sde, Wanted
from models.engines.openai import write_once
from models.engines.parallel import mapped
from models.serving import messages
from models.serving.retry import PassingError, Patience
from models.serving.server_client import RefusedError, ServerClient

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")
#: Maximum bytes of an answer, and additional bytes per number of its latents: float32 in base64.
_MOST, _MOST_PER_NUMBER = 1 << 20, 6
#: The server has other weights than a request names.
_OTHER_WEIGHTS = 409
_AGAIN = "Committed results stay, and nothing of this batch was stored: give the same command again."


@dataclass(kw_only=True)
class Flowmill:
    """Servers that ``flowmill serve-rollout`` runs with the same config: they draw the samples that this process would
    draw, and get the weights over HTTP."""

    servers: Annotated[
        tuple[Annotated[str, Field(pattern="^https?://")], ...],
        Field(min_length=1),
        "Give the address that 'flowmill serve-rollout' printed; addresses begin with http:// or https://.",
    ]
    """Addresses; each draws a batch at a time, and the others take over if one fails."""
    timeout_s: PositiveFloat = 600.0
    """Seconds for a request and its whole answer."""
    patience_s: NonNegativeFloat = 120.0
    """Seconds of failures of all servers, which are retried, after which the run stops."""
    tolerance: PositiveFloat | None = None
    """Relative distance of velocities from the policy's above which samples are refused; when absent 1e-3 in float32,
    else 0.05."""
    log_prob_tolerance: PositiveFloat = 1e-3
    """Mean distance of log-probs from the policy's, per latent, above which samples are refused."""
    part_mb: PositiveInt = 32
    """Megabytes of weights in a request; a server takes bodies of at least twice as many (`--max-mb`)."""

    draws_alike: ClassVar[bool] = True

    def lacks(self, section: RolloutSection, sde: Sde) -> str | None:
        """Return None: it is the same sampler."""
        return None

    def open(self, drawing: Drawing) -> Sequence[RolloutServer]:
        """Return the servers of a rollout."""
        return [RolloutServer(self, url, drawing) for url in self.servers]

    def held(self, server: RolloutServer) -> bool:
        """Return whether a server has the weights already."""
        return server.held() == server.drawing.weights.name

    def bring(self, server: RolloutServer) -> None:
        """Send the trained tensors, in parts; the last one puts all into effect."""
        weights = server.drawing.weights
        for part in weights.parts(self.part_mb * 1_000_000):
            server.load(chain_wire.FROM_TENSOR, _update(weights.name, chain_wire.pack_tensors(part), last=False))
        server.load(chain_wire.FROM_TENSOR, _update(weights.name, "", last=True))

    def name(self, server: RolloutServer) -> str | None:
        """Return the name of the weights that requests are for."""
        return server.drawing.weights.name


@dataclass(kw_only=True)
class SGLang(Flowmill):
    """SGLang's diffusion servers (`sglang serve`): they draw with their own kernels and noise, and load the weights
    from a folder."""

    folder: str | None = None
    """Where the denoisers are written before a rollout, adapters merged: a place shared with the servers. Without it
    you load the weights."""

    draws_alike: ClassVar[bool] = False

    def lacks(self, section: RolloutSection, sde: Sde) -> str | None:
        """Return why it cannot draw the chains of a rollout, and a remedy."""
        if sde.kind not in ("sde", "cps", "ode"):
            return f"it has no rollout.sampler '{sde.kind}'. Set that to 'flow_sde' or 'cps'."
        if section.solver != "euler":
            return f"it has no rollout.solver '{section.solver}'. Set that to 'euler'."
        if section.same_noise:
            return "it draws the start and all noise of a chain from one seed. Set rollout.same_noise to false."
        return None

    def held(self, server: RolloutServer) -> bool:
        """Return whether this process loads no weights: SGLang does not name them."""
        return self.folder is None

    def bring(self, server: RolloutServer) -> None:
        """Write the denoisers into the folder, and have a server load them."""
        drawing = server.drawing
        target = Path(str(self.folder)).expanduser().absolute() / f"policy-{drawing.weights.name[:16]}"
        try:
            write_once(target, drawing.weights.write)
        except OSError as error:
            raise EngineError(
                f"rollout.engine: the policy cannot be written into its option 'folder', '{self.folder}': {error}. "
                f"Choose another folder, which the servers can read too. {_AGAIN}"
            ) from None
        modules = sorted(path.name for path in target.iterdir() if path.is_dir())
        server.load(chain_wire.FROM_DISK, {"model_path": str(target), "target_modules": modules})

    def name(self, server: RolloutServer) -> str | None:
        """Return None: requests have no extension."""
        return None


def _update(name: str, tensors: str, *, last: bool) -> dict[str, Any]:
    """Return the body of a part of weights, without pickles."""
    return {"serialized_named_tensors": [tensors], "load_format": "safetensors", "weights": name, "last": last}


class RolloutServer:
    """One server of a rollout; used by one thread at a time."""

    def __init__(self, engine: Flowmill, url: str, drawing: Drawing) -> None:
        """Make the client; no request is sent yet."""
        self._engine, self.url, self.drawing = engine, url, drawing
        token = os.environ.get(chain_wire.TOKEN)
        # The pool of servers is patient.
        self._client = ServerClient(
            Patience(0),
            timeout_s=engine.timeout_s,
            concurrency=drawing.call.batch_size,
            base_url=url,
            headers={} if token is None else {"authorization": f"Bearer {token}"},
        )
        self._proved = False

    def ready(self) -> None:
        """Bring the weights if the server lacks them, and check its chain of the proof; see ``ChainServer``."""
        if self._proved:
            return
        if not self._engine.held(self):
            self._engine.bring(self)
        self.drawing.prove(self.url, self._chain(self.drawing.proof))
        self._proved = True

    def chains(self, wanted: Sequence[Wanted]) -> list[Chain]:
        """Return chains, one request each, all at once: a server waits only briefly for the others of a batch."""
        return mapped(self._chain, wanted, len(wanted))

    def held(self) -> str | None:
        """Return the name of the weights that a ``serve-rollout`` draws with."""

        def read(answer: httpx.Response) -> str | None:
            found = _json(answer).get(chain_wire.EXTENSION)
            return None if found is None else str(found)

        return self._send(chain_wire.HELD, read, most=_MOST, json={})

    def load(self, path: str, body: dict[str, Any]) -> None:
        """Have the server load weights; raise EngineError if it does not say that it did."""

        def read(answer: httpx.Response) -> Any:
            return _json(answer).get("success")

        if self._send(path, read, most=_MOST, json=body) is not True:
            raise EngineError(f"{self._place} did not load the weights of the policy. See its log. {_AGAIN}")

    def _chain(self, wanted: Wanted) -> Chain:
        call = self.drawing.call
        body = chain_wire.request_of(call, wanted, weights=self._engine.name(self))

        def read(answer: httpx.Response) -> Chain:
            stated = answer.headers.get(messages.CHECKSUM)
            if stated is not None and stated != messages.checksum(answer.content):
                raise PassingError("its answer does not match the answer's checksum")
            try:
                return chain_wire.chain_of(answer.content, call, wanted)
            except messages.WireError as error:
                raise PassingError(f"its answer is malformed: {error}") from None

        # Servers that do not know which states are wanted return all.
        most = _MOST + _MOST_PER_NUMBER * (call.steps + 2) * math.prod(call.shape)
        return self._send(chain_wire.GENERATE, read, most=most, json=body)

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
            if refused.status == _OTHER_WEIGHTS:
                self._proved = False
                raise PassingError(refused.detail) from None
            said = f"refuses ({refused})" if refused.status else f"the address {refused.detail}"
            raise EngineError(f"{self._place}: {said.rstrip('.')}.{by_proxy(self.url)} {_AGAIN}") from None


def _json(answer: httpx.Response) -> dict[str, Any]:
    try:
        found = json_of(answer.content)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise PassingError("its answer is no JSON object")
    return found
