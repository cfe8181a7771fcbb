from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tasks.algorithms.advantages import (
    Normalizer,
    damp_below,
    gdpo_advantages,
    group_advantages,
    group_ranks,
    group_statistics,
    running_advantages,
    shape_advantages,
)


def advantages_of(rewards: Tensor, groups: Tensor, *, clip: float = 5.0, **normalizer: Any) -> Tensor:
    return shape_advantages(group_advantages(rewards, groups, Normalizer(**normalizer)), groups, clip=clip)


def test_two_groups_by_hand() -> None:
    rewards, groups = torch.tensor([0.0, 1.0, 5.0, 5.0]), torch.tensor([0, 0, 1, 1])
    by_group = advantages_of(rewards, groups, epsilon=0.0)
    assert by_group.tolist() == [-1.0, 1.0, 0.0, 0.0]
    std = float(rewards.double().std(correction=0))
    by_all = advantages_of(rewards, groups, std="global", epsilon=0.0)
    torch.testing.assert_close(by_all, torch.tensor([-0.5 / std, 0.5 / std, 0.0, 0.0]))


@pytest.mark.parametrize("value", [0.1, 0.7, 1e6, -3.3])
@pytest.mark.parametrize("std", ["group", "global"])
def test_constant_groups_are_exactly_zero(value: float, std: str) -> None:
    rewards = torch.tensor([value] * 7 + [0.0, 1.0])
    groups = torch.tensor([0] * 7 + [1, 1])
    advantages = advantages_of(rewards, groups, std=std)
    assert advantages[:7].tolist() == [0.0] * 7
    assert advantages[7] != 0


@given(st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=30), st.integers(1, 4))
def test_group_advantages_sum_to_zero_and_ignore_order(values: list[float], count: int) -> None:
    rewards = torch.tensor(values)
    groups = torch.arange(len(values)) % count
    _, groups = torch.unique(groups, return_inverse=True)
    ours = advantages_of(rewards, groups, clip=100.0)
    sums = torch.zeros(int(groups.max()) + 1).index_add_(0, groups, ours)
    assert float(sums.abs().max()) < 1e-3
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(0))
    shuffled = advantages_of(rewards[order], groups[order], clip=100.0)
    torch.testing.assert_close(shuffled, ours[order])


def test_clipping() -> None:
    rewards = torch.cat([torch.zeros(99), torch.ones(1)])
    assert float(advantages_of(rewards, torch.zeros(100, dtype=torch.int64), epsilon=0.0).max()) == 5


def test_std_does_not_cancel() -> None:
    # A float32 sum-of-squares formula gives a negative variance here.
    rewards = 1e4 + torch.tensor([0.0, 1e-2, 2e-2, 3e-2], dtype=torch.float64)
    statistics = group_statistics(rewards, torch.zeros(4, dtype=torch.int64))
    assert float(statistics.std) == pytest.approx(0.011180339887, rel=1e-6)


def test_a_million_samples_are_no_matter_of_groups() -> None:
    count = 1_000_000
    rewards, groups = torch.rand(count), torch.arange(count) // 16
    begun = time.process_time()
    advantages = advantages_of(rewards, groups)
    assert len(advantages) == count
    # A loop over groups with masks takes minutes; this is an order of magnitude check, not a speed claim.
    assert time.process_time() - begun < 10


def test_ranks_within_groups() -> None:
    values, groups = torch.tensor([3.0, 1.0, 2.0, 5.0, 4.0]), torch.tensor([0, 1, 0, 0, 1])
    rank, size = group_ranks(values, groups)
    assert rank.tolist() == [1, 0, 0, 2, 1]
    assert size.tolist() == [3, 2, 3, 3, 2]


def test_modes_by_hand() -> None:
    advantages, groups = torch.tensor([-2.0, 0.5, 1.5, -0.1, 0.0, 0.0]), torch.tensor([0, 0, 0, 0, 1, 1])
    shaped = {
        mode: [round(v, 4) for v in shape_advantages(advantages, groups, mode=mode).tolist()]
        for mode in ("all", "positive_only", "negative_only", "binary", "best_worst")
    }
    assert shaped == {
        "all": [-2.0, 0.5, 1.5, -0.1, 0.0, 0.0],
        "positive_only": [0.0, 0.5, 1.5, 0.0, 0.0, 0.0],
        "negative_only": [-2.0, 0.0, 0.0, -0.1, 0.0, 0.0],
        "binary": [-1.0, 1.0, 1.0, -1.0, 0.0, 0.0],
        "best_worst": [-1.0, 0.0, 1.0, 0.0, 0.0, 0.0],
    }
    assert shape_advantages(advantages, groups, best_of=2).tolist()[:4] == [-2.0, 0.0, 1.5, 0.0]


def test_running_statistics_by_hand() -> None:
    rewards, groups = torch.tensor([1.0, 3.0, 5.0, 5.0]), torch.tensor([0, 0, 1, 1])
    history = [torch.tensor([0.0, 4.0]), torch.tensor([])]
    ours = running_advantages(rewards, groups, history, buffer=3, min_count=3, epsilon=0.0)
    recent, everything = torch.tensor([4.0, 1.0, 3.0]).double(), rewards.double()
    expected = [(v - recent.mean()) / recent.std(correction=0) for v in (1.0, 3.0)]
    expected += [(5.0 - everything.mean()) / everything.std(correction=0)] * 2
    torch.testing.assert_close(ours, torch.stack(expected))


def test_gdpo_gives_small_rewards_their_say() -> None:
    groups = torch.tensor([0, 0, 1, 1])
    loud, quiet = torch.tensor([0.0, 100.0, 0.0, 100.0]), torch.tensor([0.01, 0.0, 0.01, 0.0])
    normalizer = Normalizer(floor="max", epsilon=1e-6)
    assert gdpo_advantages([loud, quiet], [1.0, 1.0], groups, normalizer).abs().max() < 1e-6
    summed = group_advantages(loud + quiet, groups, normalizer)
    assert float(summed.abs().min()) > 0.9
    constant = gdpo_advantages([torch.ones(4), torch.ones(4)], [1.0, 1.0], groups, normalizer)
    assert constant.tolist() == [0.0] * 4


def test_samples_below_a_threshold_are_damped() -> None:
    advantages, rewards = torch.tensor([-1.0, 1.0, 2.0]), torch.tensor([0.1, 0.2, 0.9])
    assert damp_below(advantages, rewards, threshold=0.5, factor=0.0).tolist() == [0.0, 0.0, 2.0]
    assert damp_below(advantages, rewards, threshold=0.15, factor=0.5).tolist() == [-0.5, 1.0, 2.0]
