"""A gate on the KL by how much other rewards doubt the optimized one, by hand and in a run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from flowmill.configs.errors import ConfigError
from flowmill.configs.load import differences
from flowmill.configs.registry import create
from flowmill.models.rewards import REWARDS
from flowmill.models.rewards.base import Batch
from flowmill.models.rewards.diversity import PixelDiversity, mean_to_others, nearest_other
from flowmill.models.rewards.invocation import score
from flowmill.storage.trajectories.tables import read_rows
from flowmill.tasks.advantages.groups import diversity_weighted
from flowmill.tasks.advantages.uncertainty import uncertain, win_rates
from flowmill.tasks.checks.check import check_config
from flowmill.tasks.runs.context import RunContext
from tests.support.inside import Make, prepare, run_epoch

NAN = float("nan")


def test_win_rates_by_hand() -> None:
    rates = win_rates(torch.tensor([1.0, 3.0, 2.0, 3.0, NAN]))
    torch.testing.assert_close(rates, torch.tensor([0.0, 2.5 / 3, 1 / 3, 2.5 / 3, NAN]).double(), equal_nan=True)
    assert win_rates(torch.tensor([4.0])).tolist() == [0.0]
    values = torch.randn(50, generator=torch.Generator().manual_seed(0))
    slow = [((v > values).sum() + ((v == values).sum() - 1) / 2) / 49 for v in values]
    torch.testing.assert_close(win_rates(values), torch.tensor(slow).double())


def test_samples_that_only_the_reward_likes_are_uncertain() -> None:
    reward = torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0])
    agreeing, doubting = reward.clone(), torch.tensor([1.0, 5.0, 4.0, 3.0, 2.0])
    assert uncertain(reward, [agreeing], 0.5).tolist() == [False] * 5
    assert uncertain(reward, [doubting], 1.0).tolist() == [True, False, False, False, False]
    # Two monitors of which one agrees doubt half as much, and still that sample alone.
    assert uncertain(reward, [agreeing, doubting], 1.0).tolist() == [True, False, False, False, False]
    noisy = torch.tensor([3.0, 1.0, 2.0, 5.0, 4.0])
    gap = win_rates(reward) - win_rates(noisy)
    high = gap[gap >= 0]
    assert uncertain(reward, [noisy], 0.5).tolist() == (gap > torch.quantile(high, 0.5)).tolist()
    assert not uncertain(torch.tensor([NAN, 1.0, 2.0]), [torch.tensor([1.0, 2.0, NAN])], 1.0)[0]


def test_the_kl_is_subtracted_from_uncertain_samples_alone(make_config: Make) -> None:
    monitors = "monitors=[{name: jpeg_incompressibility}, {name: digits}]"
    rewards = {}
    for name, more in (("all", []), ("gated", ["advantage.kl_gate=0.5"])):
        overrides = ["advantage.kl_coef=0.5", monitors, "optimize.learning_rate=0.01", f"run.name={name}"]
        context = prepare(make_config(*overrides, *more))
        for epoch in (1, 2):
            run_epoch(context, epoch)
        found = context.chain.find(2, "advantage")
        assert found is not None
        rewards[name] = read_rows(context.store, found.ref).to_pydict()["reward"]
    scores = {
        section.slot: torch.tensor(read_rows(context.store, entry.ref).column("reward").to_numpy())
        for section in context.config.scored
        if (entry := context.chain.find(2, "score", section.slot)) is not None
    }
    plain = scores["jpeg_compressibility"]
    gate = uncertain(plain, [scores["jpeg_incompressibility"], scores["digits"]], 0.5)
    assert 0 < gate.sum() < len(gate)
    np.testing.assert_allclose(np.array(rewards["gated"])[~gate], plain[~gate].numpy(), rtol=1e-6)
    # The first epoch's weights are the base model's: both runs are the same until the second one's rewards.
    np.testing.assert_allclose(np.array(rewards["gated"])[gate], np.array(rewards["all"])[gate], rtol=1e-6)
    assert (np.array(rewards["gated"])[gate] < plain[gate].numpy()).all()
    assert context.store.require(found.ref).summary["gated_ratio"] == gate.double().mean()


def test_advantages_are_weighed_by_how_unlike_others_a_sample_is(make_config: Make) -> None:
    monitors = "monitors=[{name: digits}, {name: diversity, options: {to: nearest}}]"
    context = prepare(make_config(monitors, "run.name=plain"))
    run_epoch(context, 1)
    weighed = prepare(make_config(monitors, "advantage.diversity=diversity", "run.name=weighed"))
    run_epoch(weighed, 1)
    plain, rare = (_table(each, "advantage") for each in (context, weighed))
    assert plain["reward"] == rare["reward"]
    groups = torch.tensor([sorted(set(plain["group_id"])).index(name) for name in plain["group_id"]])
    distances = torch.tensor(_table(weighed, "score", "diversity")["reward"], dtype=torch.float64)
    expected = diversity_weighted(torch.tensor(plain["advantage"], dtype=torch.float64), groups, distances)
    # Both are clipped at 5, after the weight.
    np.testing.assert_allclose(rare["advantage"], expected.clamp(-5, 5), rtol=1e-5)
    assert rare["advantage"] != plain["advantage"]
    # The monitor that weighs does not doubt, and one below 0 is no distance.
    gate = ["advantage.kl_gate=0.5", "advantage.kl_coef=0.1", "advantage.diversity=digits"]
    with pytest.raises(ConfigError, match="no monitors to doubt"):
        check_config(make_config("monitors=[{name: digits}]", *gate))
    negative = "monitors=[{name: constant, options: {value: -1}}]"
    broken = prepare(make_config(negative, "advantage.diversity=constant", "run.name=broken"))
    with pytest.raises(ConfigError, match="a score below 0 is no distance"):
        run_epoch(broken, 1)


def _table(context: RunContext, *node: str) -> dict[str, list[Any]]:
    found = context.chain.find(1, *node)
    assert found is not None
    table: dict[str, list[Any]] = read_rows(context.store, found.ref).to_pydict()
    return table


def test_monitors_that_gate_are_not_free_to_change(make_config: Make) -> None:
    one, other = "monitors=[{name: digits}]", "monitors=[{name: jpeg_incompressibility}]"
    gate = ["advantage.kl_gate=0.5", "advantage.kl_coef=0.1"]
    configs = [make_config(*more).model_dump(mode="json") for more in ([one], [other], [one, *gate], [other, *gate])]
    assert differences(configs[0], configs[1]) == []
    assert differences(configs[2], configs[3]) == ["monitors.0.name: 'digits' -> 'jpeg_incompressibility'"]
    weighing = [make_config(m, "advantage.diversity=digits").model_dump(mode="json") for m in (one, other)]
    assert differences(weighing[0], weighing[1]) == ["monitors.0.name: 'digits' -> 'jpeg_incompressibility'"]


def test_diversity_is_the_mean_distance_to_the_others() -> None:
    media = np.zeros((3, 2, 2, 3), np.uint8)
    media[2] = 255
    found = score(PixelDiversity(), "diversity", Batch(media=media, prompts=["a"] * 3, metadata=[{}] * 3))
    np.testing.assert_allclose(found.values, [0.5, 0.5, 1.0])
    apart = Batch(media=media, prompts=["a"] * 3, metadata=[{}] * 3, groups=["x", "x", "y"])
    np.testing.assert_allclose(score(PixelDiversity(), "diversity", apart).values, [0.0, 0.0, 0.0])
    assert mean_to_others(np.zeros((1, 1))).tolist() == [0.0]


def test_the_nearest_of_the_others() -> None:
    media = np.zeros((3, 2, 2, 3), np.uint8)
    media[2] = 255
    batch = Batch(media=media, prompts=["a"] * 3, metadata=[{}] * 3)
    np.testing.assert_allclose(score(PixelDiversity(to="nearest"), "diversity", batch).values, [0.0, 0.0, 1.0])
    assert nearest_other(np.zeros((1, 1))).tolist() == [0.0]
    with pytest.raises(ConfigError, match="to is 'all'"):
        create(REWARDS, "diversity", {"to": "all"}, label="reward")
