from __future__ import annotations

import hashlib
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowmill.tasks.runs.seeds import derive, epoch_prompts, generator


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


@pytest.mark.parametrize("part", ["", 'a "quoted\\ text"', "\u00e9\u2028\x7f\x00\n", -(1 << 70), True, 0])
def test_a_seed_is_the_hash_of_its_parts_as_canonical_json(part: int | str) -> None:
    text = json.dumps([3, "token", part], separators=(",", ":"), ensure_ascii=False)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    assert derive(3, "token", part) == int.from_bytes(digest, "big") >> 1
