"""Work that goes on behind the caller's: what is made is written and committed while the next is made."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

T = TypeVar("T")


class Behind:
    """One thread that does what may wait, in order, while its caller goes on; it is never more than one thing behind.

    Each failure is told once, by the next call; leaving waits for what was begun.
    """

    def __init__(self) -> None:
        """Start no thread yet."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="behind")
        self._last: Future[object] | None = None

    def __enter__(self) -> Behind:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(wait=True)

    def wait(self) -> None:
        """Wait for what was begun.

        Raises:
            Exception: it failed.
        """
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def do(self, work: Callable[[], T]) -> Future[T]:
        """Begin something once what was begun before is done.

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
