from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.algorithms.advantages import group_advantages, group_statistics


def test_two_groups_by_hand() -> None:
    rewards, groups = torch.tensor([0.0, 1.0, 5.0, 5.0]), torch.tensor([0, 0, 1, 1])
    by_group = group_advantages(rewards, groups, std="group", epsilon=0.0, clip=5.0)
    assert by_group.tolist() == [-1.0, 1.0, 0.0, 0.0]
    std = float(rewards.double().std(correction=0))
    by_all = group_advantages(rewards, groups, std="global", epsilon=0.0, clip=5.0)
    torch.testing.assert_close(by_all, torch.tensor([-0.5 / std, 0.5 / std, 0.0, 0.0]))


@pytest.mark.parametrize("value", [0.1, 0.7, 1e6, -3.3])
@pytest.mark.parametrize("std", ["group", "global"])
def test_constant_groups_are_exactly_zero(value: float, std: str) -> None:
    rewards = torch.tensor([value] * 7 + [0.0, 1.0])
    groups = torch.tensor([0] * 7 + [1, 1])
    advantages = group_advantages(rewards, groups, std=std, epsilon=1e-4, clip=5.0)  # type: ignore[arg-type]
    assert advantages[:7].tolist() == [0.0] * 7
    assert advantages[7] != 0


@given(st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=30), st.integers(1, 4))
def test_group_advantages_sum_to_zero_and_ignore_order(values: list[float], count: int) -> None:
    rewards = torch.tensor(values)
    groups = torch.arange(len(values)) % count
    _, groups = torch.unique(groups, return_inverse=True)
    ours = group_advantages(rewards, groups, std="group", epsilon=1e-4, clip=100.0)
    sums = torch.zeros(int(groups.max()) + 1).index_add_(0, groups, ours)
    assert float(sums.abs().max()) < 1e-3
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(0))
    shuffled = group_advantages(rewards[order], groups[order], std="group", epsilon=1e-4, clip=100.0)
    torch.testing.assert_close(shuffled, ours[order])


def test_clipping() -> None:
    rewards = torch.cat([torch.zeros(99), torch.ones(1)])
    assert (
        float(group_advantages(rewards, torch.zeros(100, dtype=torch.int64), std="group", epsilon=0, clip=5).max()) == 5
    )


def test_std_does_not_cancel() -> None:
    # A float32 sum-of-squares formula gives a negative variance here.
    rewards = 1e4 + torch.tensor([0.0, 1e-2, 2e-2, 3e-2], dtype=torch.float64)
    statistics = group_statistics(rewards, torch.zeros(4, dtype=torch.int64))
    assert float(statistics.std) == pytest.approx(0.011180339887, rel=1e-6)


def test_a_million_samples_are_no_matter_of_groups() -> None:
    count = 1_000_000
    rewards, groups = torch.rand(count), torch.arange(count) // 16
    begun = time.process_time()
    advantages = group_advantages(rewards, groups, std="group", epsilon=1e-4, clip=5.0)
    assert len(advantages) == count
    # A loop over groups with masks takes minutes; this is an order of magnitude check, not a speed claim.
    assert time.process_time() - begun < 10
