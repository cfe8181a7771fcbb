"""Writes the samples of a shard while the next are sampled."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np
import xxhash

from flowmill.storage.artifacts.row_digest import Contents
from flowmill.storage.backends.base import FileEntry
from flowmill.storage.trajectories.base import Sample, TrajectoryWriter
from flowmill.tasks.runs.background_commit import BackgroundCommit


class ShardWriter:
    """Writes the samples of a shard behind those who make them."""

    def __init__(self, writer: TrajectoryWriter, shown: Callable[[Iterable[np.ndarray]], None]) -> None:
        self.rows = 0
        """Samples added so far."""
        self.contents = Contents()
        """Digest of the samples written so far."""
        self.repeats = 0
        """Samples whose media or tokens equal those of an earlier sample of their group."""
        self._seen = defaultdict[str, set[tuple[str, bytes]]](set)
        self._writer = writer
        self._shown = shown
        self._behind = BackgroundCommit()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *error: object) -> None:
        if any(error):
            self._behind.close(wait=True)

    def add(self, samples: Sequence[Sample]) -> None:
        """Write samples.

        Raises:
            Exception: those before could not be written.
        """
        self.rows += len(samples)
        self._count_repeats(samples)
        self._shown(sample.media for sample in samples if sample.media is not None)
        self._behind.do(lambda: self._write(samples))

    def end(self) -> Callable[[], Sequence[FileEntry]]:
        """Write the rest; return a function that waits for it and returns the entries of hashed files.

        Raises:
            Exception: samples could not be written.
        """
        ended = self._behind.do(self._writer.end)
        self._behind.close(wait=False)
        return ended.result

    def contents_of(self, prompts: Collection[str]) -> list[str]:
        """Return the digest of each different sample of some prompts, by their ids, with its group."""
        keys = [key for prompt in prompts for key in self._seen[prompt]]
        return sorted(xxhash.xxh3_64_hexdigest(group.encode() + content) for group, content in keys)

    def _count_repeats(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            content = sample.tokens if sample.media is None else sample.media
            if content is not None:
                key = (sample.group_id, xxhash.xxh3_128_digest(np.ascontiguousarray(content).data))
                seen = self._seen[sample.prompt_id]
                self.repeats += key in seen
                seen.add(key)

    def _write(self, samples: Sequence[Sample]) -> None:
        self._writer.add(samples)
        for sample in samples:
            sample.add_to(self.contents)
