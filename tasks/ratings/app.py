"""The page for raters, as a FastAPI app: a JSON interface and static files, nothing from elsewhere.

Status codes: 401 wrong token, 404 unknown pair or sample, 409 the pair is answered already or nothing can be undone,
413 the body is too large or of unknown size, 422 the body is not valid. All but 200 have a JSON body with a message.
Nothing that the page receives says which artifact or run a sample is from. The organizer's page has a token of its own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.staticfiles import StaticFiles

from flowmill.configs.addresses import holds_token
from flowmill.configs.errors import CorruptError, FlowmillError
from flowmill.storage.artifacts.lineage import RunFolder
from flowmill.tasks.ratings.answers import check_writable
from flowmill.tasks.ratings.export import exported_rows, written
from flowmill.tasks.ratings.groups import SampleSource
from flowmill.tasks.ratings.request import TOKEN, RateRequest, RaterName
from flowmill.tasks.ratings.session import AnswerBody, RaterBody, RatingSession

_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src blob: data:; media-src blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
#: Most bytes of a body; an answer has 200, and a note at most 3000.
_BODY = 4096


def make_app(
    run: RunFolder,
    sources: Sequence[SampleSource],
    request: RateRequest,
    token: str | None,
    organizer: str = "",
    guidelines: str = "",
) -> FastAPI:
    """Return the app with which raters compare samples and stores their answers in a run.

    Args:
        request: question, task, number of pairs and seed.
        token: token of raters; None: anyone who reaches the server is one.
        organizer: token of the organizer's page; empty: nobody may read it.
        guidelines: those of raters if the request has none.
    """
    check_writable(run)
    session = RatingSession(run, sources, request, guidelines)

    app = FastAPI(title="flowmill rate", docs_url=None, redoc_url=None, openapi_url=None)

    @app.middleware("http")
    async def protect(incoming: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        """Refuse a request before its body is read, and keep the page from loading or running anything else."""
        refused = _refusal(incoming, token, organizer)
        response = await answer(incoming) if refused is None else refused
        response.headers.update(_HEADERS)
        return response

    _explain(app)

    _answer_raters(app, session)
    _answer_organizer(app, session, run, request.question)
    app.mount("/", StaticFiles(directory=Path(__file__).parent / "page", html=True))
    return app


def _answer_raters(app: FastAPI, session: RatingSession) -> None:
    @app.get("/api/question")
    def question() -> dict[str, Any]:
        """Return what raters are to do."""
        return session.question()

    @app.get("/api/group")
    def group(rater: RaterName) -> dict[str, Any]:
        """Return the next pair or group of a rater."""
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


def _answer_organizer(app: FastAPI, session: RatingSession, run: RunFolder, question: str) -> None:
    @app.get("/api/organizer")
    def overview() -> dict[str, Any]:
        """Return progress, figures and disputed pairs."""
        return session.overview()

    @app.get("/api/organizer/export")
    def export(form: Literal["csv", "jsonl"]) -> Response:
        """Return the answers as a file; images and clips are named, and not part of it."""
        rows = exported_rows(run, question)
        return Response(written(rows, form), media_type="text/csv" if form == "csv" else "application/jsonl")


def _refusal(request: Request, token: str | None, organizer: str) -> Response | None:
    """Return the answer to a request without the token, or with too large a body; None to accept it."""
    status, why = 0, ""
    size = request.headers.get("content-length", "0")
    path, bearer = request.scope["path"], request.headers.get("authorization", "")
    organizes = organizer != "" and holds_token(bearer, organizer)
    if path.startswith("/api/organizer") and not organizes:
        status, why = 401, "This page needs the link that 'flowmill rate' printed when it started. Open that."
    elif path.startswith("/api/") and not organizes and not holds_token(bearer, token):
        status, why = 401, f"The token is missing or wrong: it is the value of {TOKEN} of the server."
    elif "transfer-encoding" in request.headers or not size.isdecimal() or len(size) > 9 or int(size) > _BODY:
        status, why = 413, f"The body must state its size and have at most {_BODY} bytes."
    # Closed, so that the rest of the body is not received either.
    return JSONResponse({"detail": why}, status_code=status, headers={"connection": "close"}) if status else None


def _explain(app: FastAPI) -> None:
    @app.exception_handler(FlowmillError)
    def refuse(request: Request, error: FlowmillError) -> JSONResponse:
        """Answer with the message of an error."""
        return JSONResponse({"detail": str(error)}, status_code=500 if isinstance(error, CorruptError) else 409)

    @app.exception_handler(RequestValidationError)
    def correct(request: Request, error: RequestValidationError) -> JSONResponse:
        """Answer with the first invalid value of a request."""
        first = error.errors()[0]
        return JSONResponse({"detail": f"{first['loc'][-1]}: {first['msg']}."}, status_code=422)
