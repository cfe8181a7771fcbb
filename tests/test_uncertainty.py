"""A gate on the KL by how much other rewards doubt the optimized one, by hand and in a run."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from configs.errors import ConfigError
from configs.load import differences
from configs.schema import RunConfig
from models.rewards.base import Batch
from models.rewards.call import score
from models.rewards.diversity import PixelDiversity, mean_to_others
from tasks.algorithms.uncertainty import uncertain, win_rates
from tasks.check import check_config
from tasks.stage import StageRun
from tasks.stages import make_stage
from tasks.stages.advantage import read_advantages, read_rewards
from tests.conftest import prepare

Make = Callable[..., RunConfig]
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
    common = ["advantage.kl_coef=0.5", monitors, "optimize.learning_rate=0.01"]
    found = {}
    for name, more in (("all", []), ("gated", ["advantage.kl_gate=0.5"])):
        context = prepare(make_config(*common, *more, f"run.name={name}"))
        for epoch in (1, 2):
            StageRun(make_stage(context, "rollout", epoch)).execute()
            for section in context.config.scored:
                StageRun(make_stage(context, "score", epoch, section.slot)).execute()
            for stage in ("advantage", "optimize"):
                StageRun(make_stage(context, stage, epoch)).execute()
        entries = {slot: context.chain.find(1, "score", slot) for slot in ("jpeg_compressibility", "digits")}
        plain = {slot: read_rewards(context.store, e.ref).to_pydict()["reward"] for slot, e in entries.items() if e}
        entry = context.chain.find(1, "advantage")
        assert entry is not None
        found[name] = (plain, read_advantages(context.store, entry.ref).to_pydict()["reward"])
        if name == "gated":
            later = context.chain.find(2, "advantage")
            assert later is not None
            assert 0 < context.store.require(later.ref).summary["gated_ratio"] < 1
    plain, rewards = found["gated"]
    scores = torch.tensor(plain["jpeg_compressibility"])
    # LoRA-free weights start at the base model: the first epoch's KL is 0, and so is what is subtracted.
    np.testing.assert_allclose(rewards, scores.numpy(), rtol=1e-5)


def test_monitors_that_gate_are_not_free_to_change(make_config: Make) -> None:
    one, other = "monitors=[{name: digits}]", "monitors=[{name: jpeg_incompressibility}]"
    gate = ["advantage.kl_gate=0.5", "advantage.kl_coef=0.1"]
    configs = [make_config(*more).model_dump(mode="json") for more in ([one], [other], [one, *gate], [other, *gate])]
    assert differences(configs[0], configs[1]) == []
    assert differences(configs[2], configs[3]) == ["monitors.0.name: 'digits' -> 'jpeg_incompressibility'"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["advantage.kl_gate=0.1", "monitors=[{name: digits}]"], "but advantage.kl_coef is 0"),
        (["advantage.kl_gate=0.1", "advantage.kl_coef=0.1"], "there are no monitors to doubt a reward by"),
    ],
)
def test_a_gate_with_nothing_to_gate_is_refused(make_config: Make, overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_config(make_config(*overrides))


def test_diversity_is_the_mean_distance_to_the_others() -> None:
    media = np.zeros((3, 2, 2, 3), np.uint8)
    media[2] = 255
    found = score(PixelDiversity(), "diversity", Batch(media=media, prompts=["a"] * 3, metadata=[{}] * 3))
    np.testing.assert_allclose(found.values, [0.5, 0.5, 1.0])
    apart = Batch(media=media, prompts=["a"] * 3, metadata=[{}] * 3, groups=["x", "x", "y"])
    np.testing.assert_allclose(score(PixelDiversity(), "diversity", apart).values, [0.0, 0.0, 0.0])
    assert mean_to_others(np.zeros((1, 1))).tolist() == [0.0]
