"""The HTTP side of ``flowmill serve-rollout``: a FastAPI app around one policy that draws chains.

Status codes besides those of ``guarded``: 409 the server has other weights, 400 not the protocol, 422 the policy cannot
draw this, or these are not its weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from fastapi import Depends, FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from configs.errors import FlowmillError
from configs.validation_messages import first_error
from models.engines import chain_wire
from models.engines.chain_wire import ChainRequest
from models.engines.chains import Chain
from models.serving import messages
from models.serving.batching import Batcher, Limits, Metrics
from models.serving.guarded import Door, RefusedRequest

if TYPE_CHECKING:
    from torch import Tensor

#: Seconds a request waits for the others of its batch.
_WAIT_S = 0.1


class DrawsChains(Protocol):
    """The policy behind a server."""

    lost: ClassVar[type[FlowmillError]]
    """Raised for requests of other weights."""

    @property
    def name(self) -> str:
        """Name of the run whose config is served."""

    @property
    def size(self) -> int:
        """Maximum rows of a batch."""

    @property
    def weights(self) -> str:
        """Name of the weights that it draws with."""

    def bring(self, name: str, tensors: Mapping[str, Tensor], *, last: bool) -> None:
        """Take a part of its trained tensors; after the last one, draw with them. Raises FlowmillError."""

    def admit(self, request: ChainRequest) -> None:
        """Check that it can draw a chain; raise FlowmillError."""

    def alike(self, request: ChainRequest) -> Hashable:
        """Return a value that is equal for requests that can share a batch."""

    def draw(self, requests: Sequence[ChainRequest]) -> list[Chain]:
        """Return the chains of requests that are alike; raise FlowmillError."""


class _Update(BaseModel):
    """A part of the policy's trained tensors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    serialized_named_tensors: list[str] = Field(min_length=1, max_length=1)
    """Tensors in base64, as safetensors has them, or an empty text."""
    load_format: Literal["safetensors"]
    weights: str = Field(pattern="^[0-9a-z]{1,64}$")
    """Digest of all parts."""
    last: bool


def make_app(policy: DrawsChains, *, token: str | None = None, max_bytes: int = 256_000_000) -> FastAPI:
    """Return the app that serves a policy.

    Args:
        policy: the policy.
        token: token of callers; None: any caller is accepted.
        max_bytes: the largest request body.
    """
    metrics = Metrics("rollout")
    limits = Limits(join=policy.size, wait_s=_WAIT_S)
    batcher = Batcher(policy.draw, size=lambda request: 1, alike=policy.alike, limits=limits, metrics=metrics)
    door = Door(token=token, variable=chain_wire.TOKEN, max_bytes=max_bytes, metrics=metrics)
    app = door.app(f"rollouts of {policy.name}", batcher.run)

    @app.get(chain_wire.HEALTH)
    def health() -> dict[str, str]:
        """Report that the policy is loaded."""
        return {"status": "ready", "config": policy.name}

    @app.post(chain_wire.HELD, dependencies=[Depends(door.authorized)])
    def held() -> dict[str, str]:
        """Name the weights that chains are drawn with."""
        return {chain_wire.EXTENSION: policy.weights}

    @app.post(chain_wire.FROM_TENSOR, dependencies=[Depends(door.authorized)])
    async def load(request: Request) -> dict[str, Any]:
        """Take a part of the policy's trained tensors."""
        with door.room(request):
            body = await door.body(request)
            await _answered(policy, asyncio.to_thread(_load, policy, body))
        metrics.requests.labels("200").inc()
        return {"success": True, "message": ""}

    @app.post(chain_wire.GENERATE, dependencies=[Depends(door.authorized)])
    async def generate(request: Request) -> Response:
        """Draw a chain."""
        with door.room(request):
            asked = await _answered(policy, asyncio.to_thread(chain_wire.read_request, await door.body(request)))
            await _answered(policy, asyncio.to_thread(policy.admit, asked))
            chain = await _answered(policy, door.answered(batcher, asked))
            body = await asyncio.to_thread(chain_wire.pack_chain, asked, chain)
        metrics.requests.labels("200").inc()
        return Response(body, media_type=messages.TYPE, headers={messages.CHECKSUM: messages.checksum(body)})

    return app


def _load(policy: DrawsChains, body: bytes) -> None:
    try:
        update = _Update.model_validate_json(body)
    except ValidationError as error:
        raise messages.WireError(first_error(error)) from None
    (text,) = update.serialized_named_tensors
    tensors = chain_wire.unpack_tensors(text, "serialized_named_tensors") if text else {}
    policy.bring(update.weights, tensors, last=update.last)


async def _answered(policy: DrawsChains, work: Any) -> Any:
    """Return the result of work; its errors become refusals."""
    try:
        return await work
    except messages.WireError as error:
        raise RefusedRequest(400, f"no request for rollouts: {error}") from None
    except policy.lost as error:
        raise RefusedRequest(409, str(error)) from None
    except FlowmillError as error:
        raise RefusedRequest(422, str(error)) from None
