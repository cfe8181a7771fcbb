"""Samples that are joined lose nothing of what each of them has."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np

from flowmill.models.rewards.base import Batch, Metadata, joined
from flowmill.models.rewards.errors import Origin
from flowmill.models.rewards.invocation import Handling, score


def batch_of(rows: range) -> Batch:
    return Batch(
        media=np.array([[row] for row in rows]),
        prompts=[f"prompt {row}" for row in rows],
        metadata=[{"row": row} for row in rows],
        groups=[f"group {row // 2}" for row in rows],
        references=[[np.array([row])] for row in rows],
        origin=Origin(samples=[f"sample {row}" for row in rows], shard="first"),
    )


def test_joined_batches_are_the_batch_they_were_taken_from() -> None:
    whole = batch_of(range(5))
    found = joined([whole.take([0, 1]), whole.take([2]), whole.take([3, 4])])
    assert np.array_equal(found.media, whole.media)
    for each in fields(Batch):
        assert each.name == "media" or getattr(found, each.name) == getattr(whole, each.name), each.name


def test_frames_are_scored_without_a_copy_of_their_clip_for_each() -> None:
    class Counting:
        def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Metadata) -> np.ndarray:
            return media[:, 0, 0, 0].astype(np.float32)

    clips = np.arange(3 * 40, dtype=np.uint8).reshape(3, 40, 1, 1, 1) + np.zeros((1, 1, 64, 64, 3), np.uint8)
    batch = Batch(media=clips, prompts=["a", "b", "c"], metadata=[{}] * 3, groups=["g", "g", "h"])
    tracemalloc.start()
    values = score(Counting(), "counting", batch, Handling(frames=2, batch_size=4)).values
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.testing.assert_allclose(values, clips[:, ::2, 0, 0, 0].mean(1))
    assert peak < 3 * clips.nbytes


def test_where_samples_are_from_is_told_if_all_say_it() -> None:
    one, other = batch_of(range(2)), replace(batch_of(range(2, 4)), origin=None)
    assert joined([one, other]).origin is None
    assert joined([one]) is one
