"""Client of a reward server: retries with growing pauses, and all threads give up together on an absent server.

A failed or malformed answer is never a score. Requests name the reward and contain no other data of the run.
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
#: Bytes of a request in addition to its media: prompts and metadata of a few rows.
_ROOM = 1 << 16
#: Maximum bytes of a response, and additional bytes per row for its score and note.
_MOST, _MOST_PER_ROW = 1 << 20, 1 << 16
#: Status codes that call for a retry.
_LATER = frozenset({408, 429, 500, 502, 503, 504})
_REMEDY = (
    "Start it again with 'flowmill serve-reward', and give the same command: committed results stay, and no other "
    "samples were scored."
)


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
        """Bind to a server without a request.

        Args:
            server: its address and the limits of requests.
            name: the reward it must serve.
            options: the options that reward must have.
            transport: transport of requests, for tests.
            sleep: waits some seconds before a retry.
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
        """Request the served reward, with little patience: a server that never answered is probably not running.

        Raises:
            ConfigError: it is not a reward server, or serves another reward.
            RewardError: it does not answer.
        """
        self._patience.seconds = min(_FIRST_S, self._server.patience_s)
        try:
            self.needs  # noqa: B018 - the answer is cached
        finally:
            self._patience.seconds = self._server.patience_s

    @property
    def needs(self) -> Needs:
        """The needs of the reward.

        Raises:
            ConfigError: it is not a reward server, or serves another reward.
            RewardError: it does not answer.
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
        """Return the server's scores, from several requests if one would exceed its size limit.

        Raises:
            ConfigError: it refuses to answer.
            RewardError: the reward fails there, or the server does not answer.
        """
        batch = Batch(media=media, prompts=prompts, metadata=metadata, references=references)
        parts = [self._ask(part) for part in self._parts(batch)]
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
            rows = max(1, (self._info.max_bytes - _ROOM - shared) * len(batch) // (batch.media.nbytes + texts))
        for start in range(0, len(batch), rows):
            yield batch.take(range(start, min(start + rows, len(batch))))

    def _ask(self, batch: Batch) -> Scores:
        body = wire.pack_request(batch)
        wanted = wire.identity(self._name, self._options)
        # A restarted server may serve another reward, so each request names its own.
        headers = {"content-type": wire.TYPE, wire.CHECKSUM: wire.checksum(body), wire.REWARD: wanted}

        def ask() -> Scores:
            answer = self._send(
                "POST", wire.SCORE, content=body, headers=headers, most=_MOST + _MOST_PER_ROW * len(batch)
            )
            if answer.headers.get(wire.CHECKSUM) != wire.checksum(answer.content):
                raise PassingError("its answer does not match the answer's checksum")
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
                    f"{self._place}: the server there is no reward server of flowmill. Set 'server' to the address "
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
        """Return a response of status 200; raise ``PassingError`` if a retry may help, another error if not."""
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
        status, detail = answer.status_code, _detail(answer)
        if status in _LATER:
            raise PassingError(f"it answers {status}: {detail}")
        if status == httpx.codes.UNPROCESSABLE_ENTITY:
            raise RewardError(detail)
        if status in (httpx.codes.BAD_REQUEST, httpx.codes.REQUEST_ENTITY_TOO_LARGE):
            raise RewardError(f"{self._place} refuses samples: {detail}.")
        raise ConfigError(f"{self._place} refuses to answer ({status}): {detail}.{by_proxy(self._server.url)}")

    def _again(self, ask: Callable[[], T]) -> T:
        """Return the result of a request, retried until the server has failed all threads for ``patience_s``."""
        try:
            return self._patience.again(ask)
        except PassingError as error:
            raise RewardError(
                f"{self._place} has given no answer for {self._patience.seconds:g} s; the last: {error}."
                f"{by_proxy(self._server.url)} {_REMEDY}"
            ) from None


def _detail(answer: httpx.Response) -> str:
    """Return the text of a refusal, in a line."""
    try:
        found = json_of(answer.content)
    except ValueError:
        return text_of(answer.content).strip()[:200] or "nothing"
    return str(found.get("detail", found))[:2000] if isinstance(found, dict) else str(found)[:200]
