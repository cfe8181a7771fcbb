"""Retries requests to a server with growing pauses, until it has failed all threads for some time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import tenacity

T = TypeVar("T")


class PassingError(Exception):
    """An error that a retry may cure."""


class Patience:
    """Maximum duration of a server's failure; threads share its start, so that they give up together."""

    def __init__(self, seconds: float, sleep: Callable[[float], None] = time.sleep) -> None:
        """Start with a server that has not failed.

        Args:
            seconds: duration of failures after which retries end.
            sleep: waits some seconds before a retry.
        """
        self.seconds = seconds
        self._sleep = sleep
        self._failing_since: float | None = None
        self._lock = threading.Lock()

    def again(self, ask: Callable[[], T]) -> T:
        """Return the result of a call, with retries; after others gave up it is called once.

        Raises:
            PassingError: the last failure.
        """
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(PassingError),
            wait=tenacity.wait_random_exponential(multiplier=0.2, max=5),
            stop=lambda state: self._given_up(),
            sleep=self._sleep,
            reraise=True,
        )
        found: T = retrying(self._noted, ask)
        return found

    def _noted(self, ask: Callable[[], T]) -> T:
        try:
            found = ask()
        except PassingError:
            with self._lock:
                if self._failing_since is None:
                    self._failing_since = time.monotonic()
            raise
        self._failing_since = None
        return found

    def _given_up(self) -> bool:
        since = self._failing_since
        return since is not None and time.monotonic() - since >= self.seconds
