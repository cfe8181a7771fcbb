"""Models of rewards leave the device when nobody scores: moves are noted instead of made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from flowmill.configs.rewards import RewardSection
from flowmill.configs.schema import RunConfig
from flowmill.models.policies.parts import Part
from flowmill.models.rewards import device_placement
from flowmill.models.rewards.device_placement import Placed, modules_of
from flowmill.models.rewards.factory import RewardCache
from tests.support.inside import prepare, session_of

DEVICE = torch.device("meta")


class Recorded(nn.Linear):
    """Says where it was moved."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.moves: list[str] = []

    def to(self, *args: Any, **kwargs: Any) -> Recorded:
        self.moves.append(torch.device(args[0]).type)
        return self


class Scorer:
    """A reward with a model."""

    def __init__(self) -> None:
        self._model = Recorded()

    def score(self, media: Any, prompts: Any, metadata: Any) -> list[float]:
        return [float(len(self._model.moves))] * len(prompts)


class Asking:
    """A reward that asks another."""

    def __init__(self) -> None:
        self._inner = Scorer()


@pytest.fixture
def placed_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_placement, "device_of", lambda module: DEVICE)


@pytest.mark.usefixtures("placed_elsewhere")
def test_a_model_comes_back_once_and_never_leaves_while_somebody_scores() -> None:
    reward = Scorer()
    placed = Placed(reward)
    with placed.at_work(), placed.at_work():
        assert not placed.rest()
    assert placed.rest()
    assert not placed.rest(), "it rests already"
    with placed.at_work(), placed.at_work():
        pass
    assert reward._model.moves == ["cpu", "meta"]


def test_what_is_in_host_memory_stays_there() -> None:
    placed = Placed(Scorer())
    assert not placed.rest()


def test_models_of_rewards_that_are_asked_count_too() -> None:
    asking = Asking()
    assert modules_of(asking) == [asking._inner._model]
    assert modules_of(len) == []


@pytest.mark.usefixtures("placed_elsewhere")
def test_models_of_rewards_leave_when_a_stage_of_the_policy_begins(
    make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    host, made = session_of(prepare(make_config())).host, RewardCache()
    monkeypatch.setattr("flowmill.models.rewards.factory._make", lambda section: Scorer())
    host.rewards = made
    reward: Any = host.rewards.of(RewardSection(name="jpeg_compressibility"))
    parts = frozenset({Part.DENOISER})
    for work in ("rollout 1", "rollout 1", "optimize 1"):
        host.prepare(parts, work)
        with host.rewards.at_work(reward):
            pass
    assert reward._model.moves == ["cpu", "meta", "cpu", "meta"], "its shards move nothing"
