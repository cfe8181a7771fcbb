"""Retries requests to a server with growing pauses, until it has failed all threads for some time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import tenacity

T = TypeVar("T")
#: Maximum seconds before a retry that a server can ask for.
_LONGEST_S = 60.0


class PassingError(Exception):
    """An error that a retry may cure."""

    def __init__(self, text: str, after_s: float = 0.0) -> None:
        """Bind to a message, and to the seconds after which the server accepts another request."""
        super().__init__(text)
        self.after_s = min(after_s, _LONGEST_S)


class Patience:
    """Maximum duration of a server's failure; threads share its start, so that they give up together."""

    def __init__(
        self, seconds: float, sleep: Callable[[float], None] = time.sleep, *, tries: int = 1, pause_s: float = 0.2
    ) -> None:
        """Start with a server that has not failed.

        Args:
            seconds: duration of failures after which retries end.
            tries: minimum number of calls.
            pause_s: maximum pause before the first retry, which doubles with each, up to 5 s.
        """
        self.seconds = seconds
        self._sleep, self._tries = sleep, tries
        self._pause = tenacity.wait_random_exponential(multiplier=pause_s, max=5)
        self._failing_since: float | None = None
        self._lock = threading.Lock()

    def again(self, call: Callable[[], T]) -> T:
        """Return the result of a call, with retries; after others gave up it is called once. Raises PassingError, the
        last failure."""
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(PassingError),
            wait=self._wait,
            stop=lambda state: state.attempt_number >= self._tries and self._expired(),
            sleep=self._sleep,
            reraise=True,
        )
        return retrying(self._noted, call)

    def _noted(self, call: Callable[[], T]) -> T:
        try:
            result = call()
        except PassingError:
            with self._lock:
                if self._failing_since is None:
                    self._failing_since = time.monotonic()
            raise
        except Exception:
            # A refusal is an answer too.
            self._failing_since = None
            raise
        self._failing_since = None
        return result

    def _wait(self, state: tenacity.RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome is not None else None
        return max(self._pause(state), error.after_s if isinstance(error, PassingError) else 0.0)

    def _expired(self) -> bool:
        since = self._failing_since
        return since is not None and time.monotonic() - since >= self.seconds
