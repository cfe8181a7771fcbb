"""Background commits: a result is written and committed while the next one is computed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class BackgroundCommit:
    """One thread that runs deferred work in order while its caller continues; at most one item is pending.

    The next call raises a failure, once; leaving the context waits for pending work.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="behind")
        self._last: Future[object] | None = None

    def __enter__(self) -> BackgroundCommit:
        return self

    def __exit__(self, *error: object) -> None:
        self.close(wait=True)

    def wait(self) -> None:
        """Wait for pending work.

        Raises:
            Exception: the work failed.
        """
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def do(self, work: Callable[[], T]) -> Future[T]:
        """Begin work once the pending work is done.

        Raises:
            Exception: the pending work failed; the new work is not started.
        """
        self.wait()
        begun = self._pool.submit(work)
        self._last = begun  # type: ignore[assignment] # a future of anything
        return begun

    def close(self, *, wait: bool) -> None:
        """Accept no more work; the thread ends after the pending work, whether or not this call waits for it."""
        self._pool.shutdown(wait=wait)
