from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from storage.records import ShardRecord
from tasks.runs.seeds import derive, epoch_prompts, generator
from tasks.stages.rollout import cover


def test_seeds_are_what_they_were() -> None:
    # A change here changes every result.
    assert derive(0, "noise", 1, "p", 2, 3) == 691155026015351993
    assert float(torch.randn(1, generator=generator(1))) == float(torch.randn(1, generator=generator(1)))


def test_every_part_matters() -> None:
    base = (0, "noise", 1, "p", 2, 3)
    variants = [
        (1, "noise", 1, "p", 2, 3),
        (0, "plan", 1, "p", 2, 3),
        (0, "noise", 12, "p", 3),
        (0, "noise", 1, "p", 23),
    ]
    assert len({derive(*parts) for parts in [base, *variants]}) == len(variants) + 1
    assert all(0 <= derive(*parts) < 2**63 for parts in variants)


@given(st.integers(1, 50), st.integers(1, 50), st.integers(0, 5), st.integers(1, 30))
def test_an_epoch_takes_a_prompt_at_most_once(count: int, per_epoch: int, seed: int, epoch: int) -> None:
    per_epoch = min(per_epoch, count)
    chosen = epoch_prompts(count, per_epoch, seed=seed, epoch=epoch)
    assert len(chosen) == len(set(chosen)) == per_epoch
    assert set(chosen) <= set(range(count))


def test_a_pass_takes_every_prompt_when_it_can() -> None:
    taken = [prompt for epoch in range(1, 5) for prompt in epoch_prompts(12, 3, seed=0, epoch=epoch)]
    assert sorted(taken) == list(range(12))
    assert epoch_prompts(12, 3, seed=0, epoch=5) != epoch_prompts(12, 3, seed=0, epoch=1)


def record(start: int, stop: int) -> ShardRecord:
    return ShardRecord(shard=f"{start:06d}-{stop:06d}", digest="", rows=1, files=())


@given(st.integers(1, 40), st.integers(1, 10), st.lists(st.tuples(st.integers(0, 39), st.integers(1, 5)), max_size=5))
def test_shards_cover_everything_once_whatever_is_committed(total: int, size: int, done: list) -> None:
    committed, reach = [], 0
    for start, length in sorted(done):
        if start >= reach and start + length <= total:
            committed.append(record(start, start + length))
            reach = start + length
    shards = cover(total, size, committed)
    assert [i for shard in shards for i in range(shard.start, shard.stop)] == list(range(total))
    assert {r.shard for r in committed} <= {shard.name for shard in shards}


def test_an_artifact_begun_with_one_shard_size_is_finished_with_another() -> None:
    names = [shard.name for shard in cover(12, 4, [record(3, 6)])]
    assert names == ["000000-000003", "000003-000006", "000006-000008", "000008-000012"]
