"""Clips with sound as files that every player supports; browsers do not play the lossless stored files."""

from __future__ import annotations

from collections.abc import Collection

from storage.trajectories.base import TrajectoryShard
from storage.trajectories.media import MediaFormat
from tasks.reports.reading import rows_of
from tasks.runs.chain import Chain


def film_of(shard: TrajectoryShard, row: int, *, fps: int) -> bytes | None:
    """Return an mp4 (H.264, AAC) of a stored clip with sound; None for every other sample.

    Raises:
        CorruptError: the stored file cannot be decoded.
    """
    sound = shard.sound_of(row)
    if sound is None:
        return None
    return MediaFormat(name="mp4", lossless=False, fps=fps, codec="aac").encode(shard.media(row), sound)


def films_of(
    chain: Chain, epoch: int, samples: Collection[str] | None = None, *, evaluation: bool = False
) -> dict[str, bytes]:
    """Return mp4 files of the samples of an epoch that have sound, by sample id.

    Raises:
        NotCommittedError: the samples are not committed yet.
        StoreError: there is no such sample.
        CorruptError: a file is damaged.
    """
    ref = chain.require(*chain.plan.media_of(epoch, evaluation=evaluation)).ref
    fps = chain.config.rollout.media.fps
    films = {name: film_of(shard, row, fps=fps) for name, shard, row in rows_of(chain.store, ref, samples)}
    return {name: film for name, film in films.items() if film is not None}
