"""Work that goes on behind the caller's: what is made is written and committed while the next is made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

import numpy as np

from storage.roots.base import FileEntry
from storage.trajectories.base import Sample, TrajectoryWriter

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


class ShardWriter:
    """Writes the samples of a shard behind those who make them."""

    def __init__(self, writer: TrajectoryWriter, shown: Callable[[Iterable[np.ndarray]], None]) -> None:
        """Bind to the writer of the shard's format, and to who else takes the media."""
        self.rows = 0
        """Samples added so far."""
        self._writer = writer
        self._shown = shown
        self._behind = Behind()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._behind.close(wait=True)

    def add(self, samples: Sequence[Sample]) -> None:
        """Write samples.

        Raises:
            Exception: those before could not be written.
        """
        self.rows += len(samples)
        self._shown(sample.media for sample in samples if sample.media is not None)
        self._behind.do(lambda: self._writer.add(samples))

    def end(self) -> Callable[[], Sequence[FileEntry]]:
        """Write what is left; return what waits for all of it and gives the entries that are known of the files.

        Raises:
            Exception: what was added could not be written.
        """
        ended = self._behind.do(self._writer.end)
        self._behind.close(wait=False)
        return ended.result
