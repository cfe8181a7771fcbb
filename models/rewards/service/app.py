"""The reward server's HTTP side: a FastAPI app around one reward.

Status codes: 401 wrong token, 409 another reward is served, 413 too large, 400 not the protocol, 408 too slow,
422 the reward failed for these samples, 429 busy, 503 the reward cannot reach a service it needs. All but 200 have a
JSON body with a message.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from configs.addresses import holds_token
from configs.errors import FlowmillError
from models.rewards.base import Reward, Scores, perfect_score
from models.rewards.invocation import needs_of_made
from models.rewards.service import wire
from models.rewards.service.batching import Batcher, BusyError, Limits, Metrics

#: Number of request bodies of the maximum size that may be in memory at a time.
_BODIES = 2
#: Seconds to receive a body, and bytes per second for which more time is given.
_BODY_S, _BODY_RATE = 30.0, 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A reward and how it is served."""

    reward: Reward
    """The reward, made."""
    name: str
    """Name in the table, or an import string."""
    options: Mapping[str, Any]
    token: str | None = None
    """Token of callers; None: any caller is accepted."""
    max_bytes: int = 256_000_000
    """The largest request body."""
    limits: Limits = field(default_factory=Limits)


class _Room:
    """The memory left for request bodies, in bytes."""

    def __init__(self, size: int) -> None:
        self._left = size

    @contextlib.contextmanager
    def taken(self, size: int) -> Iterator[None]:
        """Reserve bytes for a request until it is answered; refuse if too few are left."""
        if size > self._left:
            raise _Refused(429, f"the bodies of other requests leave {self._left} bytes, this needs {size}; ask again")
        self._left -= size
        try:
            yield
        finally:
            self._left += size


class _Refused(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def make_app(served: Served) -> FastAPI:
    """Return the app that serves a reward."""
    metrics = Metrics()
    room = _Room(_BODIES * served.max_bytes)
    batcher = Batcher(served.reward, served.name, served.limits, metrics)

    @contextlib.asynccontextmanager
    async def working(app: FastAPI) -> AsyncIterator[None]:
        work = asyncio.create_task(batcher.run())
        yield
        work.cancel()

    app = FastAPI(title=f"reward {served.name}", lifespan=working, docs_url=None, redoc_url=None)

    def authorized(request: Request) -> None:
        if not holds_token(request.headers.get("authorization", ""), served.token):
            raise _Refused(401, f"the token is missing or wrong: set {wire.TOKEN} to the server's")

    @app.exception_handler(_Refused)
    async def refuse(request: Request, refused: _Refused) -> JSONResponse:
        """Answer with the reason of a refusal."""
        metrics.requests.labels(str(refused.status)).inc()
        more = {"retry-after": "1"} if refused.status == 429 else {}
        return JSONResponse({"detail": str(refused)}, status_code=refused.status, headers=more)

    @app.get(wire.HEALTH)
    def health() -> dict[str, str]:
        """Report that the reward is loaded."""
        return {"status": "ready", "reward": served.name}

    @app.get(wire.METRICS, dependencies=[Depends(authorized)])
    def read_metrics() -> Response:
        """Return the counts."""
        return Response(metrics.text(), media_type="text/plain")

    @app.get(wire.INFO, dependencies=[Depends(authorized)])
    def info() -> dict[str, Any]:
        """Describe the served reward."""
        return wire.RewardInfo(
            name=served.name,
            options=dict(served.options),
            needs=wire.NeedsFields(**wire.needs_fields(needs_of_made(served.reward))),
            perfect=perfect_score(served.reward),
            max_bytes=served.max_bytes,
        ).model_dump(exclude_defaults=True)

    @app.post(wire.SCORE, dependencies=[Depends(authorized)])
    async def score(request: Request) -> Response:
        """Score samples."""
        with room.taken(_size(request, served.max_bytes)):
            body = wire.pack_answer(await _scores(request, served, batcher))
        metrics.requests.labels("200").inc()
        return Response(body, media_type=wire.TYPE, headers={wire.CHECKSUM: wire.checksum(body)})

    return app


async def _scores(request: Request, served: Served, batcher: Batcher) -> Scores:
    if request.headers.get(wire.REWARD) != wire.identity(served.name, served.options):
        raise _Refused(
            409, f"'{served.name}' with the options {dict(served.options)} is served here, another is wanted"
        )
    body = await _body(request, served.max_bytes)
    if request.headers.get(wire.CHECKSUM) != wire.checksum(body):
        raise _Refused(400, "the body does not match its checksum: it was changed on its way")
    try:
        return await batcher.submit(await asyncio.to_thread(wire.unpack_request, body))
    except asyncio.CancelledError:
        # The server is stopping, and has waited for running calls.
        raise _Refused(503, "the server stops; ask again later") from None
    except wire.WireError as error:
        raise _Refused(400, f"no request for scores: {error}") from None
    except BusyError as busy:
        raise _Refused(429, f"{busy}; ask again later") from None
    except FlowmillError as error:
        raise _Refused(422, str(error)) from None
    except OSError as error:
        raise _Refused(503, f"{type(error).__name__}: {error}") from None


def _size(request: Request, most: int) -> int:
    """Return the size limit of a request's body: its stated size, or the maximum."""
    stated = request.headers.get("content-length", "")
    size = int(stated) if stated.isdecimal() and len(stated) < 18 else most + bool(stated)
    if size > most:
        raise _Refused(413, f"the body is larger than the {most} bytes that this server takes")
    return size


async def _body(request: Request, most: int) -> bytes:
    """Return a request's body, read within the limits of size and time."""
    parts, size = [], 0
    limit_s = _BODY_S + _size(request, most) / _BODY_RATE
    try:
        async with asyncio.timeout(limit_s):
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise _Refused(413, f"the body is larger than the {most} bytes that this server takes")
                parts.append(part)
    except ClientDisconnect:
        raise _Refused(400, "the connection ended before the body was complete") from None
    except TimeoutError:
        raise _Refused(408, f"the body was not complete after {limit_s:.0f} s; send it again, faster") from None
    return b"".join(parts)
