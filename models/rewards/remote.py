"""Client of a reward server: retries with growing pauses, and all threads give up together on an absent server.

A failed or malformed answer is never a score. Requests name the reward and contain no other data of the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

import httpx
import numpy as np

from flowmill.configs.addresses import token_of
from flowmill.configs.answers import json_of
from flowmill.configs.errors import ConfigError, FlowmillError, RewardError, RewardServiceError
from flowmill.configs.fingerprint import canonical_json
from flowmill.configs.rewards import ServerSection
from flowmill.models.rewards.base import Batch, Metadata, Needs, Scores, Sources
from flowmill.models.rewards.errors import ErrorElsewhere
from flowmill.models.rewards.service import wire
from flowmill.models.serving import messages
from flowmill.models.serving.retry import PassingError, Patience
from flowmill.models.serving.server_client import RefusedError, ServerClient

T = TypeVar("T")
#: Seconds to wait for a server that has not answered this process yet, before anything is sampled.
_FIRST_S = 10.0
#: Bytes of a request in addition to its media: prompts and metadata of a few rows.
_ROOM = 1 << 16
#: Maximum bytes of a response, and additional bytes per row for its score and note.
_MOST, _MOST_PER_ROW = 1 << 20, 1 << 16
_REMEDY = (
    "Start it again with 'flowmill serve-reward', and give the same command: committed results stay, and no other "
    "samples were scored."
)


class _TooLargeError(RewardError):
    """A request that is larger than the server takes."""


class RemoteReward:
    """The reward of a ``flowmill serve-reward`` process."""

    def __init__(
        self,
        server: ServerSection,
        name: str,
        options: Mapping[str, Any],
        *,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._server, self._name, self._options = server, name, dict(options)
        token = token_of(wire.TOKEN)
        self._patience = Patience(server.patience_s, sleep)
        self._client = ServerClient(
            self._patience,
            timeout_s=server.timeout_s,
            concurrency=server.concurrency,
            base_url=server.url,
            headers={} if token is None else {"authorization": f"Bearer {token}"},
            transport=transport,
        )

    def introduce(self) -> None:
        """Request the served reward, with little patience: a server that never answered is probably not running. Raises
        ConfigError if it is not a reward server, or serves another reward; RewardServiceError if it does not answer."""
        self._patience.seconds = min(_FIRST_S, self._server.patience_s)
        try:
            self.needs  # noqa: B018 - the answer is cached
        finally:
            self._patience.seconds = self._server.patience_s

    @property
    def needs(self) -> Needs:
        """The needs of the reward. Raises ConfigError if it is not a reward server, or serves another reward;
        RewardServiceError if it does not answer."""
        return wire.needs_from(self._info.needs.model_dump())

    @property
    def perfect(self) -> float | None:
        """The score that counts as an exact match."""
        return self._info.perfect

    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Metadata, references: Sources = ()) -> Scores:
        """Return the server's scores, from several requests if one would exceed its size limit. Raises ConfigError if
        it refuses to answer; RewardError if the reward fails there; RewardServiceError if there is no answer."""
        batch = Batch(media=media, prompts=prompts, metadata=metadata, references=references)
        parts = [scores for part in self._parts(batch) for scores in self._in_halves(part)]
        if len(parts) == 1:
            return parts[0]
        notes = [note for part in parts for note in part.notes or [""] * len(part.values)]
        return Scores(np.concatenate([part.values for part in parts]), notes)

    def _parts(self, batch: Batch) -> Iterator[Batch]:
        """Yield a batch in parts within the server's size limit; groups stay together."""
        rows = len(batch)
        if not self.needs.groupwise:
            # Four bytes hold any character of UTF-8.
            texts = 4 * len(canonical_json([list(batch.prompts), *(dict(row) for row in batch.metadata)]))
            # Every part may contain all reference images.
            shared = sum(image.nbytes for image in wire.distinct(batch.references))
            media = 4 * sum(map(len, batch.media)) if batch.media.dtype == object else batch.media.nbytes
            rows = max(1, (self._info.max_bytes - _ROOM - shared) * len(batch) // (media + texts))
        for start in range(0, len(batch), rows):
            yield batch.take(range(start, min(start + rows, len(batch))))

    def _in_halves(self, batch: Batch) -> list[Scores]:
        """Return the scores of a part, or of its halves where the server finds it too large: rows differ in size, and a
        server that was started again may have another limit."""
        try:
            return [self._ask(batch)]
        except _TooLargeError:
            if len(batch) == 1 or self.needs.groupwise:
                raise
        middle = len(batch) // 2
        halves = batch.take(range(middle)), batch.take(range(middle, len(batch)))
        return [scores for half in halves for scores in self._in_halves(half)]

    def _ask(self, batch: Batch) -> Scores:
        try:
            body = wire.pack_request(batch)
        except messages.WireError as error:
            raise ConfigError(
                f"{self._place}: a prompt or one of its columns cannot be sent there ({error}). Messages hold "
                "integers of 64 bits and whole characters: write others as texts, or remove 'server'."
            ) from None
        identity = wire.identity(self._name, self._options)
        # A restarted server may serve another reward, so each request names its own.
        headers = {"content-type": messages.TYPE, messages.CHECKSUM: messages.checksum(body), wire.REWARD: identity}

        def read(answer: httpx.Response) -> Scores:
            if answer.headers.get(messages.CHECKSUM) != messages.checksum(answer.content):
                raise PassingError("its answer does not match the answer's checksum")
            try:
                return wire.unpack_answer(answer.content, len(batch))
            except messages.WireError as error:
                raise PassingError(f"its answer is malformed: {error}") from None

        most = _MOST + _MOST_PER_ROW * len(batch)
        return self._send("POST", wire.SCORE, read, content=body, headers=headers, most=most)

    @cached_property
    def _info(self) -> wire.RewardInfo:
        def read(answer: httpx.Response) -> wire.RewardInfo:
            try:
                return wire.RewardInfo.model_validate(json_of(answer.content))
            except ValueError:
                raise ConfigError(
                    f"{self._place}: the server there is no reward server of flowmill. Set 'server' to the address "
                    "that 'flowmill serve-reward' printed."
                ) from None

        info = self._send("GET", wire.INFO, read)
        if wire.identity(info.name, info.options) != wire.identity(self._name, self._options):
            raise ConfigError(
                f"{self._place}: it serves '{info.name}' with the options {info.options}, but the config wants "
                f"'{self._name}' with {self._options}. Scores of another reward would be taken for this one's: start "
                "the server with the same options, or change the config."
            )
        return info

    @property
    def _place(self) -> str:
        return f"reward '{self._name}' at {self._server.url}"

    def _send(
        self, method: str, path: str, read: Callable[[httpx.Response], T], *, most: int = _MOST, **more: Any
    ) -> T:
        """Return the parsed response to a request, retried until the server has failed all threads for a while."""
        try:
            return self._client.send(method, path, read, most=most, **more)
        except RefusedError as refused:
            raise self._refusal(refused) from (ErrorElsewhere(refused.cause) if refused.cause else None)
        except PassingError as error:
            raise RewardServiceError(
                f"{self._place} has given no answer for {self._patience.seconds:g} s; the last: {error}. {_REMEDY}"
            ) from None

    def _refusal(self, refused: RefusedError) -> FlowmillError:
        status, detail = refused.status, refused.detail
        if status == 0:
            return ConfigError(f"{self._place}: the address {detail.rstrip('.')}. It begins with http://.")
        if status == httpx.codes.UNPROCESSABLE_ENTITY:
            return RewardError(detail)
        if status in (httpx.codes.BAD_REQUEST, httpx.codes.REQUEST_ENTITY_TOO_LARGE):
            kind = RewardError if status == httpx.codes.BAD_REQUEST else _TooLargeError
            return kind(f"{self._place} refuses samples: {detail}.")
        return ConfigError(f"{self._place} refuses to answer ({status}): {detail}.")
