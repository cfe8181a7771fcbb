"""Background commits: a result is written and committed while the next one is computed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

T = TypeVar("T")


class BackgroundCommit:
    """One thread that runs deferred work in order while its caller continues; at most one item is pending.

    The next call raises a failure, once; leaving the context waits for pending work.
    """

    def __init__(self) -> None:
        """Set up the thread, which starts with the first work item."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="behind")
        self._last: Future[object] | None = None

    def __enter__(self) -> BackgroundCommit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
