from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flowmill.configs.errors import ConfigError
from flowmill.configs.load import load_config
from flowmill.configs.schema import RunConfig
from flowmill.tasks.advantages.groups import (
    Normalizer,
    diversity_weighted,
    gdpo_advantages,
    group_advantages,
    group_ranks,
    group_statistics,
    groups_within,
    running_advantages,
    shape_advantages,
)
from flowmill.tasks.algorithms.checks import check_advantage
from tests.conftest import ROOT
from tests.reference import advantages as slow

DIVISORS: list[dict[str, Any]] = [
    {"floor": "add", "epsilon": 0.1, "unbiased": False},
    {"floor": "add", "epsilon": 0.1, "unbiased": True},
    {"floor": "max", "epsilon": 0.4, "unbiased": False},
    {"floor": "max", "epsilon": 1e-6, "unbiased": True},
]


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


def test_the_mean_of_all_by_hand() -> None:
    """MMDanceGRPO's (r - mean) / (unbiased std + 1e-8), both over all rewards."""
    rewards, groups = torch.tensor([1.0, 1.0, 2.0, 4.0]), torch.tensor([0, 0, 1, 1])
    found = group_advantages(rewards, groups, Normalizer(std="global", mean="global", unbiased=True, epsilon=1e-8))
    assert found.tolist() == pytest.approx([-1 / 2**0.5, -1 / 2**0.5, 0.0, 2 / 2**0.5], abs=1e-6)
    assert group_advantages(torch.ones(4), groups, Normalizer(std="global", mean="global")).tolist() == [0.0] * 4


def test_bounds_of_their_own_on_either_side() -> None:
    shaped = shape_advantages(torch.tensor([-3.0, -0.5, 0.5, 3.0]), torch.zeros(4, dtype=torch.int64), clip=(-1.0, 2.0))
    assert shaped.tolist() == [-1.0, -0.5, 0.5, 2.0]


def test_soft_bounds_keep_the_order_and_small_advantages() -> None:
    advantages, groups = torch.tensor([-30.0, -3.0, -1e-3, 0.0, 3.0, 30.0]), torch.zeros(6, dtype=torch.int64)
    shaped = shape_advantages(advantages, groups, soft_clip=3.0)
    bound = 3 * 0.761594155956
    assert shaped.tolist() == pytest.approx([-3.0, -bound, -1e-3, 0.0, bound, 3.0], rel=1e-6)
    # Ranks are taken before, and signs stay.
    assert shape_advantages(advantages, groups, soft_clip=3.0, best_of=2).tolist() == pytest.approx(
        [-3.0, 0, 0, 0, 0, 3]
    )
    assert shape_advantages(advantages, groups, soft_clip=3.0, mode="positive_only").min() == 0


@pytest.mark.parametrize("clip", ["0", "[1, 2]", "[-1, -0.5]", "[-1]", "[2, -1]"])
def test_bounds_that_leave_a_side_out_are_refused(make_config: Callable[..., RunConfig], clip: str) -> None:
    with pytest.raises(ConfigError, match=r"advantage\.clip"):
        make_config(f"advantage.clip={clip}")


def test_what_is_new_leaves_names_as_they_were(make_config: Callable[..., RunConfig]) -> None:
    plain = make_config().advantage
    assert (plain.mean, plain.clip) == ("group", 5.0)
    assert make_config("advantage.clip=[-2, 5]").advantage.clip == (-2.0, 5.0)


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


def test_rare_good_samples_count_more_than_common_ones() -> None:
    advantages = torch.tensor([-1.0, 0.5, 1.0, 2.0, -2.0, 1.0, 0.5])
    groups = torch.tensor([0, 0, 0, 0, 1, 1, 1])
    distances = torch.tensor([0.9, 0.1, 0.3, 0.7, 0.0, 0.0, 0.0]).double()
    found = diversity_weighted(advantages, groups, distances)
    # The mean distance of the first group is 1/2; the samples of the second are all equal.
    assert found.tolist() == pytest.approx([-1.0, 0.1, 0.6, 2.8, -2.0, 1.0, 0.5])
    # What is not known weighs nothing, and is no part of the mean.
    distances[3] = float("nan")
    some = diversity_weighted(advantages, groups, distances).tolist()
    mean = 1.3 / 3
    assert some == pytest.approx([-1.0, 0.5 * 0.1 / mean, 0.3 / mean, 2.0, -2.0, 1.0, 0.5])


def test_who_is_best_is_decided_before_clipping() -> None:
    # Clipped to 1, the first four would be equal, and position would choose among them.
    advantages, groups = torch.tensor([3.0, 9.0, 2.0, 4.0, -3.0, -2.0, -9.0]), torch.zeros(7, dtype=torch.int64)
    best_worst = shape_advantages(advantages, groups, mode="best_worst", clip=1.0)
    assert best_worst.tolist() == [0.0, 1.0, 0.0, 0.0, 0.0, 0.0, -1.0]
    kept = shape_advantages(advantages, groups, best_of=4, clip=1.0)
    assert kept.tolist() == [0.0, 1.0, 0.0, 1.0, -1.0, 0.0, -1.0]
    # All of a group on one side of the clip: still one best and one worst.
    assert shape_advantages(
        torch.tensor([7.0, 6.0]), torch.zeros(2, dtype=torch.int64), mode="best_worst"
    ).tolist() == [1.0, -1.0]


def test_running_statistics_by_hand() -> None:
    rewards, groups = torch.tensor([1.0, 3.0, 5.0, 5.0]), torch.tensor([0, 0, 1, 1])
    history = [torch.tensor([0.0, 4.0]), torch.tensor([])]
    ours = running_advantages(rewards, groups, history, Normalizer(epsilon=0.0), buffer=3, min_count=3)
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


def random_rewards(seed: int = 0) -> tuple[list[Tensor], Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rewards = [torch.rand(12, generator=generator, dtype=torch.float64) * scale for scale in (1.0, 20.0)]
    return rewards, torch.arange(12) % 3, torch.rand(12, generator=generator, dtype=torch.float64) / 2


@pytest.mark.parametrize("divisor", DIVISORS, ids=str)
@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.3, -2.0)])
@pytest.mark.parametrize("penalized", [False, True])
def test_gdpo_equals_the_slow_one(divisor: dict[str, Any], weights: tuple[float, float], penalized: bool) -> None:
    rewards, groups, penalty = random_rewards()
    penalty = penalty * penalized
    ours = gdpo_advantages(rewards, weights, groups, Normalizer(**divisor), penalty=penalty)
    expected = slow.gdpo([r.tolist() for r in rewards], weights, groups.tolist(), penalty.tolist(), **divisor)
    assert ours.tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("weight", [0.5, 3.0])
def test_a_penalty_enters_gdpo_as_it_enters_the_sum(weight: float) -> None:
    (reward, _), groups, penalty = random_rewards()
    normalizer = Normalizer(epsilon=0.0)
    ours = gdpo_advantages([reward], [weight], groups, normalizer, penalty=penalty)
    summed = group_advantages(weight * reward - penalty, groups, normalizer)
    torch.testing.assert_close(ours, summed / summed.std(correction=0), rtol=1e-12, atol=1e-12)
    # It is a penalty: the sample that pays more falls.
    dearer = penalty.clone()
    dearer[0] += 0.2
    assert gdpo_advantages([reward], [weight], groups, normalizer, penalty=dearer)[0] < ours[0]
    # And it makes samples of equal reward differ.
    alone = gdpo_advantages([torch.ones(12)], [1.0], groups, normalizer, penalty=penalty)
    assert bool((alone != 0).all())


def test_gdpo_leaves_rewards_of_weight_zero_out() -> None:
    rewards, groups, penalty = random_rewards()
    normalizer = Normalizer()
    ours = gdpo_advantages(rewards, [1.0, 0.0], groups, normalizer, penalty=penalty)
    assert ours.tolist() == gdpo_advantages(rewards[:1], [1.0], groups, normalizer, penalty=penalty).tolist()
    assert gdpo_advantages(rewards, [0.0, 0.0], groups, normalizer, penalty=penalty).tolist() == [0.0] * 12


def test_gdpo_has_no_global_std() -> None:
    rewards, groups, _ = random_rewards()
    with pytest.raises(ValueError, match="std of its group"):
        gdpo_advantages(rewards, [1.0, 1.0], groups, Normalizer(std="global"))


@pytest.mark.parametrize("divisor", DIVISORS, ids=str)
@pytest.mark.parametrize("min_count", [2, 7])
def test_running_statistics_equal_the_slow_ones(divisor: dict[str, Any], min_count: int) -> None:
    (rewards, before), groups, _ = random_rewards()
    history = [before[groups == group][: 2 * group] for group in range(3)]
    sizes: dict[str, int] = {"buffer": 7, "min_count": min_count}
    ours = running_advantages(rewards, groups, history, Normalizer(**divisor), **sizes)
    lists = [past.tolist() for past in history]
    assert ours.tolist() == pytest.approx(slow.running(rewards.tolist(), groups.tolist(), lists, **sizes, **divisor))


def test_running_statistics_of_equal_rewards_are_exactly_zero() -> None:
    rewards, groups = torch.tensor([0.1] * 7), torch.zeros(7, dtype=torch.int64)
    same = running_advantages(rewards, groups, [rewards], Normalizer(epsilon=1e-6), buffer=14, min_count=1)
    assert same.tolist() == [0.0] * 7
    better = running_advantages(rewards, groups, [rewards - 1], Normalizer(), buffer=14, min_count=1)
    assert float(better.min()) > 0.9


def test_groups_by_their_mean_reward() -> None:
    rewards, groups = torch.tensor([0.0, 0.4, 0.5, 0.7, 0.9, 1.0]), torch.tensor([0, 0, 1, 1, 2, 2])

    def kept(low: float | None, high: float | None) -> list[bool]:
        return groups_within(rewards.double(), groups, low=low, high=high).tolist()

    assert kept(0.5, None) == [False, False, True, True, True, True]
    assert kept(None, 0.7) == [True, True, True, True, False, False]
    assert kept(0.3, 0.9) == [False, False, True, True, False, False]
    assert kept(None, None) == [True] * 6


def test_published_filter_by_hand() -> None:
    # MMDanceGRPO: a group whose mean reward is below its threshold gets 0, others (r - mean) / (unbiased std + 1e-8).
    rewards, groups = torch.tensor([0.0, 0.1, 1.0, 2.0]), torch.tensor([0, 0, 1, 1])
    scaled = group_advantages(rewards, groups, Normalizer(epsilon=1e-8, unbiased=True))
    ours = torch.where(groups_within(rewards, groups, low=0.5, high=None), scaled, 0.0)
    half = 0.5 / (0.5**0.5 + 1e-8)
    assert ours.tolist() == pytest.approx([0.0, 0.0, -half, half], rel=1e-12)


@pytest.mark.parametrize(
    "section",
    [
        "{aggregation: gdpo, floor: max, epsilon: 1e-6, unbiased: true, kl_coef: 0.1}",
        "{std: running, buffer: 8, min_count: 8, unbiased: true, floor: max, kl_coef: 0.1}",
        "{soft_clip: 3, best_of: 4}",
        "{best_of: 4, group_mean_min: 0.1, group_mean_max: 0.9}",
    ],
)
def test_settings_that_act_are_taken(section: str) -> None:
    check_advantage(load_config(ROOT / "configs" / "digits.yaml", [f"advantage={section}"]))
