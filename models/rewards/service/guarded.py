"""Access to a reward server: tokens, limits of bodies, counts.

Status codes: 401 wrong token, 413 too large, 400 a body that ends early, 408 too slow, 429 busy, 499 the caller has
gone, 503 stopping. All but 200 have a JSON body with a message.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from flowmill.configs.addresses import holds_token
from flowmill.configs.errors import whole_characters
from flowmill.models.rewards.base import Batch, Scores
from flowmill.models.rewards.service import wire
from flowmill.models.rewards.service.batching import Batcher, BusyError, Metrics

METRICS = "/metrics"
#: Number of request bodies of the maximum size that may be in memory at a time.
_BODIES = 2
#: Seconds to receive a body, and bytes per second for which more time is allowed.
_BODY_S, _BODY_RATE = 30.0, 1_000_000


class RefusedRequest(Exception):
    """A request that is refused, with a status code, the reason and, where a sample failed, its error in short."""

    def __init__(self, status: int, text: str, cause: str = "") -> None:
        super().__init__(text)
        self.status, self.cause = status, cause


class Door:
    """Lets requests in: with the token, and within the limits of size, memory and time."""

    def __init__(self, *, token: str | None, max_bytes: int, metrics: Metrics) -> None:
        """Begin without requests. ``token``: that of callers, None: any caller is accepted; ``max_bytes``: the largest
        request body."""
        self._token, self._most, self._metrics = token, max_bytes, metrics
        self._left = _BODIES * max_bytes

    def app(self, title: str, work: Callable[[], Awaitable[None]]) -> FastAPI:
        """Return an app that explains refusals and shows the counts. ``work``: runs as long as the server does."""

        @contextlib.asynccontextmanager
        async def working(app: FastAPI) -> AsyncIterator[None]:
            task = asyncio.ensure_future(work())
            yield
            task.cancel()

        app = FastAPI(title=title, lifespan=working, docs_url=None, redoc_url=None)

        @app.exception_handler(RefusedRequest)
        async def refuse(request: Request, refused: RefusedRequest) -> JSONResponse:
            self._metrics.requests.labels(str(refused.status)).inc()
            more = {"retry-after": "1"} if refused.status == 429 else {}
            said = {"detail": str(refused)} | ({"cause": refused.cause} if refused.cause else {})
            # An error of a reward may hold halves of characters, which no answer holds.
            said = {name: whole_characters(text) for name, text in said.items()}
            return JSONResponse(said, status_code=refused.status, headers=more)

        @app.get(METRICS, dependencies=[Depends(self.authorized)])
        def read_metrics() -> Response:
            return Response(self._metrics.text(), media_type="text/plain")

        return app

    def authorized(self, request: Request) -> None:
        """Refuse a request without the token."""
        if not holds_token(request.headers.get("authorization", ""), self._token):
            raise RefusedRequest(401, f"the token is missing or wrong: set {wire.TOKEN} to the server's")

    @contextlib.contextmanager
    def room(self, request: Request) -> Iterator[None]:
        """Reserve memory for the body of a request until it is answered; refuse if too little is left."""
        size = self._size(request)
        if size > self._left:
            text = f"the bodies of other requests leave {self._left} bytes, this needs {size}; ask again"
            raise RefusedRequest(429, text)
        self._left -= size
        try:
            yield
        finally:
            self._left += size

    async def body(self, request: Request) -> bytes:
        """Return a request's body, read within the limits of size and time."""
        parts, size = [], 0
        limit_s = _BODY_S + self._size(request) / _BODY_RATE
        try:
            async with asyncio.timeout(limit_s):
                async for part in request.stream():
                    size += len(part)
                    if size > self._most:
                        raise self._too_large()
                    parts.append(part)
        except ClientDisconnect:
            raise RefusedRequest(400, "the connection ended before the body was complete") from None
        except TimeoutError:
            text = f"the body was not complete after {limit_s:.0f} s; send it again, faster"
            raise RefusedRequest(408, text) from None
        return b"".join(parts)

    async def answered(self, request: Request, batcher: Batcher, work: Batch) -> Scores:
        """Return the answer to a request whose body was read, unless too many wait, the server stops, or the caller has
        gone: it asks again, and would have its samples scored twice."""
        answer, gone = asyncio.ensure_future(batcher.submit(work)), asyncio.ensure_future(_hung_up(request))
        try:
            await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise RefusedRequest(499, "the caller has gone")
            return answer.result()
        except asyncio.CancelledError:
            # The server is stopping, and has waited for running calls.
            raise RefusedRequest(503, "the server stops; ask again later") from None
        except BusyError as busy:
            raise RefusedRequest(429, f"{busy}; ask again later") from None
        finally:
            answer.cancel()
            gone.cancel()

    def _size(self, request: Request) -> int:
        """Return the size limit of a request's body: its stated size, or the maximum."""
        stated = request.headers.get("content-length", "")
        size = int(stated) if stated.isdecimal() and len(stated) < 18 else self._most + bool(stated)
        if size > self._most:
            raise self._too_large()
        return size

    def _too_large(self) -> RefusedRequest:
        return RefusedRequest(413, f"the body is larger than the {self._most} bytes that this server takes")


async def _hung_up(request: Request) -> None:
    """Return once the caller has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
