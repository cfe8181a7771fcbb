"""Whole shards, for tests that need no pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flowmill.storage.backends.base import FileEntry
from flowmill.storage.trajectories.base import Sample, TrajectoryStore
from flowmill.storage.trajectories.media import DEFAULT_MEDIA, MediaFormat


def write_samples(
    store: TrajectoryStore, folder: Path, samples: Sequence[Sample], media: MediaFormat = DEFAULT_MEDIA
) -> Sequence[FileEntry]:
    """Write all samples of one shard into an empty folder; return what is known of its files."""
    writer = store.writer(folder, media)
    writer.add(samples)
    return writer.end()
