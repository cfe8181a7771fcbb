"""The reward server's HTTP side: a FastAPI app around one reward.

Status codes: 401 wrong token, 413 too large, 400 not the protocol, 422 the reward failed for these samples, 429 busy,
503 the reward cannot reach what it needs. All but 200 carry a sentence as JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from configs.errors import FlowmillError
from models.rewards.base import Reward, perfect_score
from models.rewards.service import wire
from models.rewards.service.batching import Batcher, BusyError, Limits
from models.rewards.service.metrics import Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A reward and how it is served."""

    reward: Reward
    """The reward, made."""
    name: str
    """Of the table, or an import string."""
    options: Mapping[str, Any]
    """What it was made with."""
    token: str | None = None
    """What callers must show; None: anybody may ask."""
    max_bytes: int = 256_000_000
    """The largest request body."""
    limits: Limits = field(default_factory=Limits)
    """How much is scored at once, and may wait."""


class _Refused(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def make_app(served: Served) -> FastAPI:
    """Return the app that serves a reward."""
    metrics = Metrics()
    batcher = Batcher(served.reward, served.name, served.limits, metrics)

    @contextlib.asynccontextmanager
    async def working(app: FastAPI) -> AsyncIterator[None]:
        work = asyncio.create_task(batcher.run())
        yield
        work.cancel()

    app = FastAPI(title=f"flowmill reward {served.name}", lifespan=working, docs_url=None, redoc_url=None)

    @app.get(wire.HEALTH)
    def health() -> dict[str, str]:
        """Say that the reward is loaded."""
        return {"status": "ready", "reward": served.name}

    @app.get(wire.METRICS)
    def read_metrics(request: Request) -> Response:
        """Return the counts."""
        return _answered(request, served, lambda: Response(metrics.text(), media_type="text/plain"))

    @app.get(wire.INFO)
    def info(request: Request) -> Response:
        """Say what scores here."""
        return _answered(request, served, lambda: JSONResponse(_info(served, batcher).model_dump()))

    @app.post(wire.SCORE)
    async def score(request: Request) -> Response:
        """Score samples."""
        try:
            _authorize(request, served)
            body = wire.pack_answer(await _scores(request, served, batcher))
        except _Refused as refused:
            metrics.requests.labels(str(refused.status)).inc()
            return _refusal(refused)
        metrics.requests.labels("200").inc()
        return Response(body, media_type=wire.TYPE, headers={wire.CHECKSUM: wire.checksum(body)})

    return app


async def _scores(request: Request, served: Served, batcher: Batcher) -> Any:
    body = await _body(request, served.max_bytes)
    if request.headers.get(wire.CHECKSUM) != wire.checksum(body):
        raise _Refused(400, "the body is not what its checksum says: it was changed on its way")
    try:
        batch = wire.unpack_request(body)
    except wire.MALFORMED as error:
        raise _Refused(400, f"no request for scores: {error}") from None
    try:
        return await batcher.submit(batch)
    except BusyError as busy:
        raise _Refused(429, f"{busy}; ask again later") from None
    except FlowmillError as error:
        raise _Refused(422, str(error)) from None
    except OSError as error:
        raise _Refused(503, f"{type(error).__name__}: {error}") from None


async def _body(request: Request, most: int) -> bytes:
    """Return a request's body, read no further than is allowed."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise _Refused(413, f"the body is larger than the {most} bytes that this server takes")
        parts.append(part)
    return b"".join(parts)


def _answered(request: Request, served: Served, answer: Any) -> Response:
    try:
        _authorize(request, served)
    except _Refused as refused:
        return _refusal(refused)
    return answer()  # type: ignore[no-any-return]


def _authorize(request: Request, served: Served) -> None:
    if served.token is None:
        return
    shown = request.headers.get("authorization", "")
    if not secrets.compare_digest(shown.encode(), f"Bearer {served.token}".encode()):
        raise _Refused(401, f"the token is missing or wrong: set {wire.TOKEN} to the server's")


def _refusal(refused: _Refused) -> JSONResponse:
    more = {"retry-after": "1"} if refused.status == 429 else {}
    return JSONResponse({"detail": str(refused)}, status_code=refused.status, headers=more)


def _info(served: Served, batcher: Batcher) -> wire.RewardInfo:
    return wire.RewardInfo(
        name=served.name,
        options=dict(served.options),
        needs=dict(batcher.needs),
        perfect=perfect_score(served.reward),
        max_bytes=served.max_bytes,
        version=_version(),
    )


def _version() -> str:
    try:
        return version("flowmill")
    except PackageNotFoundError:
        return "unknown"
