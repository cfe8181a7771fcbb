"""The page for raters, as a FastAPI app: a JSON interface and static files, nothing from elsewhere.

Status codes: 401 wrong token, 404 unknown pair or sample, 409 the pair is answered already or nothing can be undone,
413 the body is too large or of unknown size, 422 the body is not valid. All but 200 have a JSON body with a message.
Nothing that the page receives says which artifact or run a sample is from.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import FastAPI, HTTPException, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel, ConfigDict, Field

from flowmill.configs.addresses import holds_token
from flowmill.configs.errors import CorruptError, FlowmillError
from flowmill.configs.escaping import visible
from flowmill.configs.fingerprint import fingerprint
from flowmill.storage.artifacts.lineage import RunFolder
from flowmill.storage.trajectories.media import DEFAULT_MEDIA
from flowmill.tasks.ratings.answers import RatingAnswer, answers_of, append_answer, check_writable, withdraw_answer
from flowmill.tasks.ratings.pairs import RatedPair, SampleSource, next_pair, pairs_of, sides
from flowmill.tasks.ratings.request import TOKEN, RateRequest, RaterName

_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src blob: data:; media-src blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
#: Most bytes of a body; an answer has 200.
_BODY = 4096
_PREFERRED = {"left": 1.0, "right": 0.0, "tie": 0.5, "skip": None}


class RaterBody(BaseModel):
    """The rater of a request."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rater: RaterName
    """Name."""


class AnswerBody(RaterBody):
    """One answer."""

    pair: str
    """The pair, as ``/api/pair`` named it."""
    choice: Literal["left", "right", "tie", "skip"]
    """The answer."""
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Time that it took."""


class _Session:
    """The pairs of a rating, and the answers of its run."""

    def __init__(self, run: RunFolder, sources: Sequence[SampleSource], request: RateRequest) -> None:
        self._run, self._limit, self._seed = run, request.pairs, request.seed
        self._pairs = {pair.draw: pair for pair in pairs_of(sources, request.seed)}
        self._keys = {pair.key for pair in self._pairs.values()}
        self._samples = {
            (source.artifact, row["sample_id"]): (source, row) for source in sources for row in source.rows
        }
        self._named = {self._name(sample): sample for sample in self._samples}
        self._lock = threading.Lock()

    def state(self, rater: str) -> dict[str, Any]:
        """Return the next pair of a rater, None after the last, and how far the rater is."""
        answered = {answer.key for answer in self._own(rater).values()}
        total = min(len(self._pairs), self._limit or len(self._pairs))
        pair = next_pair(self._pairs.values(), answered) if len(answered) < total else None
        shown = None if pair is None else self._shown(pair, rater)
        return {"rater": rater, "done": len(answered), "total": total, "pair": shown}

    def answer(self, body: AnswerBody) -> None:
        """Store an answer durably."""
        pair = self._pairs.get(body.pair)
        if pair is None:
            raise HTTPException(404, "This server does not ask for that pair. Reload the page.")
        first, second = sides(pair, body.rater)
        answer = RatingAnswer(
            prompt_id=pair.prompt_id,
            prompt=pair.prompt,
            first_artifact=first[0],
            first_sample=first[1],
            second_artifact=second[0],
            second_sample=second[1],
            preferred=_PREFERRED[body.choice],
            rater=body.rater,
            seconds=round(body.seconds, 3),
        )
        with self._lock:
            append_answer(self._run, answer)

    def undo(self, rater: str) -> None:
        """Withdraw the last answer of a rater."""
        with self._lock:
            answers = self._own(rater)
            if not answers:
                raise HTTPException(409, f"'{rater}' has no answer that could be undone. Answer a pair first.")
            withdraw_answer(self._run, max(answers))

    def media(self, name: str, start: int | None) -> tuple[str, bytes]:
        """Return the media type and bytes of a sample, or of an image that its prompt starts from."""
        if name not in self._named:
            raise HTTPException(404, "This server shows no such sample.")
        source, row = self._samples[self._named[name]]
        if start is None:
            return source.media(row)
        starts = source.starts(row["sample_id"])
        if start >= len(starts):
            raise HTTPException(404, f"The prompt of this sample starts from {len(starts)} images.")
        return "image/png", DEFAULT_MEDIA.encode(starts[start])

    def _own(self, rater: str) -> dict[int, RatingAnswer]:
        answers = answers_of(self._run).items()
        return {number: each for number, each in answers if each.rater == rater and each.key in self._keys}

    def _shown(self, pair: RatedPair, rater: str) -> dict[str, Any]:
        left, right = sides(pair, rater)
        source, row = self._samples[left]
        starts = len(source.starts(row["sample_id"]))
        return {
            "name": pair.draw,
            "prompt": visible(pair.prompt, keep="\n\t"),
            "starts": [f"api/media/{self._name(left)}?start={number}" for number in range(starts)],
            "left": self._side(left),
            "right": self._side(right),
        }

    def _side(self, sample: tuple[str, str]) -> dict[str, Any]:
        row: Mapping[str, Any] = self._samples[sample][1]
        text = row.get("text")
        drawn = f"api/media/{self._name(sample)}" if row["media_format"] else None
        return {"text": None if text is None else visible(text, keep="\n\t"), "media": drawn}

    def _name(self, sample: tuple[str, str]) -> str:
        return fingerprint([self._seed, sample])


def make_app(run: RunFolder, sources: Sequence[SampleSource], request: RateRequest, token: str | None) -> FastAPI:
    """Return the app with which raters compare samples and stores their answers in a run.

    Args:
        run: the run.
        sources: the samples.
        request: the number of pairs and the seed.
        token: token of raters; None: anyone who reaches the server is one.
    """
    check_writable(run)
    session = _Session(run, sources, request)

    app = FastAPI(title="flowmill rate", docs_url=None, redoc_url=None, openapi_url=None)

    @app.middleware("http")
    async def protect(incoming: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        """Refuse a request before its body is read, and keep the page from loading or running anything else."""
        refused = _refusal(incoming, token)
        response = await answer(incoming) if refused is None else refused
        response.headers.update(_HEADERS)
        return response

    _explain(app)

    @app.get("/api/pair")
    def pair(rater: RaterName) -> dict[str, Any]:
        """Return the next pair of a rater."""
        return session.state(rater)

    @app.post("/api/answer")
    def answer(body: AnswerBody) -> dict[str, Any]:
        """Store an answer, and return the next pair."""
        session.answer(body)
        return session.state(body.rater)

    @app.post("/api/undo")
    def undo(body: RaterBody) -> dict[str, Any]:
        """Withdraw the last answer, and return its pair if it is the next one."""
        session.undo(body.rater)
        return session.state(body.rater)

    @app.get("/api/media/{name}")
    def media(name: str, start: Annotated[int | None, Query(ge=0)] = None) -> Response:
        """Return a sample, or an image that its prompt starts from."""
        kind, data = session.media(name, start)
        return Response(data, media_type=kind)

    app.mount("/", StaticFiles(directory=Path(__file__).parent / "page", html=True))
    return app


def _refusal(request: Request, token: str | None) -> Response | None:
    """Return the answer to a request without the token, or with too large a body; None to accept it."""
    status, why = 0, ""
    size = request.headers.get("content-length", "0")
    if request.url.path.startswith("/api/") and not holds_token(request.headers.get("authorization", ""), token):
        status, why = 401, f"The token is missing or wrong: it is the value of {TOKEN} of the server."
    elif "transfer-encoding" in request.headers or not size.isdecimal() or len(size) > 9 or int(size) > _BODY:
        status, why = 413, f"The body must state its size and have at most {_BODY} bytes."
    # Closed, so that the rest of the body is not received either.
    return JSONResponse({"detail": why}, status_code=status, headers={"connection": "close"}) if status else None


def _explain(app: FastAPI) -> None:
    """Have an app answer errors with their messages."""

    @app.exception_handler(FlowmillError)
    def refuse(request: Request, error: FlowmillError) -> JSONResponse:
        """Answer with the message of an error."""
        return JSONResponse({"detail": str(error)}, status_code=500 if isinstance(error, CorruptError) else 409)

    @app.exception_handler(RequestValidationError)
    def correct(request: Request, error: RequestValidationError) -> JSONResponse:
        """Answer with the first invalid value of a request."""
        first = error.errors()[0]
        return JSONResponse({"detail": f"{first['loc'][-1]}: {first['msg']}."}, status_code=422)
