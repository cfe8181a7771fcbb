"""Samples that are joined lose nothing of what each of them has."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np

from flowmill.models.rewards.base import Batch, joined
from flowmill.models.rewards.errors import Origin


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


def test_where_samples_are_from_is_told_if_all_say_it() -> None:
    one, other = batch_of(range(2)), replace(batch_of(range(2, 4)), origin=None)
    assert joined([one, other]).origin is None
    assert joined([one]) is one
