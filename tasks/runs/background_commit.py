"""Background commits: a result is written and committed while the next one is computed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

T = TypeVar("T")


class BackgroundCommit:
    """One thread that runs deferred work in order while its caller goes on; at most one item is pending.

    Each failure is raised once, by the next call; leaving waits for pending work.
    """

    def __init__(self) -> None:
        """Start no thread yet."""
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
            Exception: it failed.
        """
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def do(self, work: Callable[[], T]) -> Future[T]:
        """Begin work once the pending work is done.

        Raises:
            Exception: what was begun before failed; this is not begun.
        """
        self.wait()
        begun = self._pool.submit(work)
        self._last = begun  # type: ignore[assignment] # a future of anything
        return begun

    def close(self, *, wait: bool) -> None:
        """Begin nothing any more; the thread ends once it has done what was begun, waited for or not."""
        self._pool.shutdown(wait=wait)
