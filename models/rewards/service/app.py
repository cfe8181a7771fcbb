"""The reward server's HTTP side: a FastAPI app around one reward.

Status codes besides those of ``guarded``: 409 another reward is served, 400 not the protocol, 422 the reward failed for
these samples, 424 it fails for any samples, 503 the reward cannot reach a service it needs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import Depends, FastAPI, Request, Response

from flowmill.configs.errors import FlowmillError, RewardServiceError
from flowmill.models.rewards.base import Batch, Reward, Scores, joined, perfect_score
from flowmill.models.rewards.errors import in_short
from flowmill.models.rewards.invocation import OF_SAMPLES, Handling, declared_needs, score
from flowmill.models.rewards.returned import MalformedError
from flowmill.models.rewards.service import wire
from flowmill.models.rewards.service.batching import Batcher, Limits, Metrics
from flowmill.models.rewards.service.guarded import Door, RefusedRequest
from flowmill.models.serving import messages


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A reward and how it is served."""

    reward: Reward
    """The reward object."""
    name: str
    """Name in the table, or an import string."""
    options: Mapping[str, Any]
    token: str | None = None
    """Token of callers; None: any caller is accepted."""
    max_bytes: int = 256_000_000
    """The largest request body."""
    batch_size: int | None = None
    """Rows per call of the reward; None: the reward's own, or those of a request."""
    limits: Limits = field(default_factory=Limits)

    @property
    def joining(self) -> Limits:
        """The limits of calls: scores may depend on the rows of a call, so requests join only where these are fixed."""
        needs = declared_needs(self.reward)
        fixed = needs.groupwise or self.batch_size is not None or needs.batch_size is not None
        return self.limits if fixed else replace(self.limits, join=1)

    def score(self, batches: Sequence[Batch]) -> list[Scores]:
        """Return the scores of requests from one call; a groupwise reward treats each request as one group."""
        apart = [replace(batch, groups=[str(number)] * len(batch)) for number, batch in enumerate(batches)]
        handling = Handling(frames="clip", batch_size=self.batch_size)
        scores, start, answers = score(self.reward, self.name, joined(apart), handling), 0, []
        for batch in batches:
            stop = start + len(batch)
            notes = None if scores.notes is None else list(scores.notes[start:stop])
            answers.append(Scores(scores.values[start:stop], notes))
            start = stop
        return answers


def make_app(served: Served) -> FastAPI:
    """Return the app that serves a reward."""
    metrics = Metrics()
    batcher = Batcher(served.score, limits=served.joining, metrics=metrics)
    door = Door(token=served.token, max_bytes=served.max_bytes, metrics=metrics)
    app = door.app(f"reward {served.name}", batcher.run)

    @app.get(wire.HEALTH)
    def health() -> dict[str, str]:
        """Report that the reward is loaded."""
        return {"status": "ready", "reward": served.name}

    @app.get(wire.INFO, dependencies=[Depends(door.authorized)])
    def info() -> dict[str, Any]:
        """Describe the served reward."""
        return wire.RewardInfo(
            name=served.name,
            options=dict(served.options),
            needs=wire.NeedsFields(**wire.needs_fields(declared_needs(served.reward))),
            perfect=perfect_score(served.reward),
            max_bytes=served.max_bytes,
        ).model_dump(exclude_defaults=True)

    @app.post(wire.SCORE, dependencies=[Depends(door.authorized)])
    async def score_samples(request: Request) -> Response:
        """Score samples."""
        with door.room(request):
            body = wire.pack_answer(await _scores(request, served, door, batcher))
        metrics.requests.labels("200").inc()
        return Response(body, media_type=messages.TYPE, headers={messages.CHECKSUM: messages.checksum(body)})

    return app


async def _scores(request: Request, served: Served, door: Door, batcher: Batcher) -> Scores:
    if request.headers.get(wire.REWARD) != wire.identity(served.name, served.options):
        raise RefusedRequest(
            409, f"'{served.name}' with the options {dict(served.options)} is served here, another is wanted"
        )
    body = await door.body(request)
    if request.headers.get(messages.CHECKSUM) != messages.checksum(body):
        raise RefusedRequest(400, "the body does not match its checksum: it was changed on its way")
    try:
        return await door.answered(request, batcher, await asyncio.to_thread(wire.unpack_request, body))
    except messages.WireError as error:
        raise RefusedRequest(400, f"no request for scores: {error}") from None
    except RewardServiceError as error:
        raise RefusedRequest(503, str(error)) from None
    except OF_SAMPLES as error:
        known = isinstance(error, FlowmillError)
        detail = str(error) if known else f"{type(error).__name__}: {error}"
        if isinstance(error, MalformedError):
            raise RefusedRequest(424, detail) from None
        raise RefusedRequest(422, detail, in_short(error)) from None
    except FlowmillError as error:
        raise RefusedRequest(424, str(error)) from None
    except OSError as error:
        raise RefusedRequest(503, f"{type(error).__name__}: {error}") from None
