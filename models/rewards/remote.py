"""A reward that a server scores: asks again with growing pauses, and gives up in one piece when the server stays away.

A failed or malformed answer is never a score. What the server is asked is the reward and nothing of the run.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NoReturn, TypeVar

import httpx
import numpy as np

from configs.answers import json_of, text_of
from configs.errors import ConfigError, RewardError
from configs.fingerprint import canonical_json
from configs.proxies import by_proxy
from configs.rewards import ServerSection
from models.rewards.base import Batch, Needs, Scores
from models.rewards.http_client import MOST, bounded_client
from models.rewards.retry import PassingError, Patience
from models.rewards.service import wire

T = TypeVar("T")

#: Seconds to wait for a connection.
_CONNECT_S = 5.0
#: Seconds to wait for a server that has not answered this process yet, before anything is sampled.
_FIRST_S = 10.0
#: Bytes of a request beside its media: prompts and metadata of a few rows.
_ROOM = 1 << 16
#: Bytes an answer may have, and those for each row of it: its score and a remark.
_MOST, _MOST_PER_ROW = 1 << 20, 1 << 16
#: Answers that say: ask again.
_LATER = frozenset({408, 429, 500, 502, 503, 504})
_REMEDY = (
    "Start it again with 'flowmill serve-reward', and give the same command: what is committed stays, and nothing else "
    "was scored."
)


class RemoteReward:
    """What a ``flowmill serve-reward`` scores with."""

    def __init__(
        self,
        server: ServerSection,
        name: str,
        options: Mapping[str, Any],
        *,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Bind to a server, of which nothing is asked yet.

        Args:
            server: where it is, and how it is asked.
            name: the reward that must score there.
            options: what that must have been made with.
            transport: how requests travel.
            sleep: waits some seconds before asking again.
        """
        self._server, self._name, self._options = server, name, dict(options)
        token = os.environ.get(wire.TOKEN)
        self._client = bounded_client(
            server.timeout_s,
            base_url=server.url,
            headers={} if token is None else {"authorization": f"Bearer {token}"},
            timeout=httpx.Timeout(server.timeout_s, connect=_CONNECT_S),
            transport=transport,
        )
        self._slots = threading.BoundedSemaphore(server.concurrency)
        self._patience = Patience(server.patience_s, sleep)

    def introduce(self) -> None:
        """Ask what is served, with little patience: a server that never answered is more likely not there than ill.

        Raises:
            ConfigError: the server is another's, or serves another reward.
            RewardError: it stays away.
        """
        self._patience.seconds = min(_FIRST_S, self._server.patience_s)
        try:
            self.needs  # noqa: B018 - what it is, is kept
        finally:
            self._patience.seconds = self._server.patience_s

    @property
    def needs(self) -> Needs:
        """What the reward needs.

        Raises:
            ConfigError: the server is another's, or serves another reward.
            RewardError: it stays away.
        """
        return wire.needs_from(self._info.needs.model_dump())

    @property
    def perfect(self) -> float | None:
        """The score that counts as an exact match."""
        return self._info.perfect

    def score(
        self,
        media: np.ndarray,
        prompts: Sequence[str],
        metadata: Sequence[Mapping[str, Any]],
        references: Sequence[Sequence[np.ndarray]] = (),
    ) -> Scores:
        """Return what the server gives; in several requests where one would be larger than it takes.

        Raises:
            ConfigError: it refuses to answer.
            RewardError: the reward fails there, or the server stays away.
        """
        batch = Batch(media=media, prompts=prompts, metadata=metadata, references=references)
        parts = [self._ask(part) for part in self._parts(batch)]
        if len(parts) == 1:
            return parts[0]
        notes = [note for part in parts for note in part.notes or [""] * len(part.values)]
        return Scores(np.concatenate([part.values for part in parts]), notes)

    def _parts(self, batch: Batch) -> Iterator[Batch]:
        """Yield a batch in parts that the server takes; what must be compared stays together."""
        rows = len(batch)
        if not self.needs.groupwise:
            # Four bytes hold any character of UTF-8.
            said = 4 * len(canonical_json([list(batch.prompts), *(dict(row) for row in batch.metadata)]))
            # An image that several rows start from goes along once, or with every part.
            shared = sum(image.nbytes for image in wire.distinct(batch.references))
            rows = max(1, (self._info.max_bytes - _ROOM - shared) * len(batch) // (batch.media.nbytes + said))
        for start in range(0, len(batch), rows):
            yield batch.take(range(start, min(start + rows, len(batch))))

    def _ask(self, batch: Batch) -> Scores:
        body = wire.pack_request(batch)
        wanted = wire.identity(self._name, self._options)
        # A server that was started again may serve another reward: each request says which it is for.
        headers = {"content-type": wire.TYPE, wire.CHECKSUM: wire.checksum(body), wire.REWARD: wanted}

        def ask() -> Scores:
            answer = self._send(
                "POST", wire.SCORE, content=body, headers=headers, most=_MOST + _MOST_PER_ROW * len(batch)
            )
            if answer.headers.get(wire.CHECKSUM) != wire.checksum(answer.content):
                raise PassingError("its answer is not what the answer's checksum says")
            try:
                return wire.unpack_answer(answer.content, len(batch))
            except wire.MALFORMED as error:
                raise PassingError(f"its answer is malformed: {wire.why(error)}") from None

        return self._again(ask)

    @cached_property
    def _info(self) -> wire.RewardInfo:
        def ask() -> wire.RewardInfo:
            answer = self._send("GET", wire.INFO)
            try:
                return wire.RewardInfo.model_validate(json_of(answer.content))
            except ValueError:
                raise ConfigError(
                    f"{self._place}: what answers there is no reward server of flowmill. Set 'server' to the address "
                    "that 'flowmill serve-reward' printed."
                ) from None

        info = self._again(ask)
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

    def _send(self, method: str, path: str, *, most: int = _MOST, **more: Any) -> httpx.Response:
        """Return an answer of status 200.

        Raises:
            PassingError: asking again may help.
            ConfigError: it never will, as the server refuses to answer.
            RewardError: it never will, as the reward fails there.
        """
        try:
            with self._slots:
                answer = self._client.request(method, path, extensions={MOST: most}, **more)
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise ConfigError(f"{self._place}: the address cannot be used: {error}. It begins with http://.") from None
        except (httpx.TransportError, httpx.DecodingError) as error:
            raise PassingError(f"{type(error).__name__}: {error}") from None
        if answer.status_code != httpx.codes.OK:
            self._refuse(answer)
        return answer

    def _refuse(self, answer: httpx.Response) -> NoReturn:
        status, said = answer.status_code, _detail(answer)
        if status in _LATER:
            raise PassingError(f"it answers {status}: {said}")
        if status == httpx.codes.UNPROCESSABLE_ENTITY:
            raise RewardError(said)
        if status in (httpx.codes.BAD_REQUEST, httpx.codes.REQUEST_ENTITY_TOO_LARGE):
            raise RewardError(f"{self._place} refuses samples: {said}.")
        raise ConfigError(f"{self._place} refuses to answer ({status}): {said}.{by_proxy(self._server.url)}")

    def _again(self, ask: Callable[[], T]) -> T:
        """Return what asking gives, asked again until the server has failed everybody for longer than is waited.

        All threads share since when it fails, so that they give up together, and one that comes later asks just once.
        """
        try:
            return self._patience.again(ask)
        except PassingError as error:
            raise RewardError(
                f"{self._place} has given no answer for {self._patience.seconds:g} s; the last: {error}."
                f"{by_proxy(self._server.url)} {_REMEDY}"
            ) from None


def _detail(answer: httpx.Response) -> str:
    """Return what a refusal says, in a line."""
    try:
        found = json_of(answer.content)
    except ValueError:
        return text_of(answer.content).strip()[:200] or "nothing"
    return str(found.get("detail", found))[:2000] if isinstance(found, dict) else str(found)[:200]
