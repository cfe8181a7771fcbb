"""A component of one's own is called, or its config is refused: none is accepted and ignored."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from flowmill.configs.components import components
from flowmill.configs.errors import ConfigError, RewardError
from flowmill.configs.load import load_config
from flowmill.models.engines.local import LocalEngine
from flowmill.models.maths.schedules import AllSteps
from flowmill.models.maths.solvers import Euler
from flowmill.models.maths.transitions import FlowSDE
from flowmill.models.rewards.base import declare
from flowmill.storage.trajectories.webdataset import WebDatasetStore
from flowmill.tasks.advantages.estimators import EarnedBySamples, Group
from flowmill.tasks.advantages.groups import Normalizer, group_advantages
from flowmill.tasks.algorithms.grpo import GRPO
from flowmill.tasks.checks.check import check_config
from flowmill.tasks.metrics.samples import artifact_table
from tests.support.given import singles, write_jsonl
from tests.support.inside import Make, evaluate, prepare, run_epoch
from tests.support.language_models import texts_data


class Called(Exception):
    """A custom component was called."""


def called(*args: Any, **kwargs: Any) -> Any:
    raise Called


class Estimator(Group):
    estimate = called


class Sampler(FlowSDE):
    step = called


class Solver(Euler):
    advance = called


class Plan(AllSteps):
    draw = called


class Store(WebDatasetStore):
    writer = called


class Engine(LocalEngine):
    complete = called


class Algorithm(GRPO):
    loss = called


class Prompts:
    choose = called


@declare(media="samples")
def reward(media: Any, prompts: Any, metadata: Any) -> Any:
    raise Called


@pytest.fixture
def make(request: pytest.FixtureRequest, make_config: Make, config_data: dict[str, Any], tmp_path: Path) -> Make:
    """Returns configs of one kind of run."""
    kind = request.param
    if kind == "steps":
        return make_config
    if kind == "final":
        return lambda *own: make_config("optimize.algorithm=nft", *own)
    if kind == "texts":
        data = texts_data(tmp_path)
    else:
        data = {**config_data, "data": {"train": str(write_jsonl(tmp_path / "given", singles())), "image": "image"}}
        data["prompts"] = {}
        data["rollout"] = {"steps": 3}
        data["optimize"] = {"learning_rate": 1e-3, "algorithm": "sft"}
    path = tmp_path / "kind.yaml"
    path.write_text(yaml.safe_dump(data))
    return lambda *own: load_config(path, own)


POINTS = {
    "advantage.estimator": "Estimator",
    "prompts.sampler": "Prompts",
    "rollout.sampler": "Sampler",
    "rollout.solver": "Solver",
    "rollout.plan": "Plan",
    "rollout.store": "Store",
    "rollout.tokens.engine": "Engine",
    "evaluate.solver": "Solver",
    "optimize.algorithm": "Algorithm",
    "rewards": "reward",
    "monitors": "reward",
    "evaluate.judges": "reward",
}
#: Points of models and processes: whatever they name is made when the run begins.
_OF_THE_RUN = {
    *("model.policy", "model.build", "render.model.policy", "render.model.build", "rollout.engine"),
    *("optimize.optimizer", "execution.launcher", "execution.runner"),
}


def test_every_point_is_tried(make_config: Make) -> None:
    config = make_config(
        'monitors=[{name: "jpeg_compressibility"}]', 'evaluate.judges=[{name: "jpeg_compressibility"}]'
    )
    found = {setting.rstrip(".0123456789") for setting, _ in components(config)}
    assert found | {"rollout.tokens.engine"} <= set(POINTS) | _OF_THE_RUN


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("make", ["steps", "final", "texts", "given"], indirect=True)
def test_a_component_of_ones_own_is_called_or_refused(make: Make, point: str) -> None:
    component = f'{{name: "{__name__}:{POINTS[point]}"}}'
    setting = f"{point}=[{component}]" if POINTS[point] == "reward" else f"{point}={component}"
    setting = f'{point}="{__name__}:{POINTS[point]}"' if POINTS[point] in ("Solver", "Store") else setting
    with pytest.raises((Called, ConfigError, RewardError)) as error:
        use(make, setting)
    assert not isinstance(error.value, RewardError) or isinstance(error.value.__cause__, Called)


def use(make: Make, setting: str) -> None:
    config = make(setting)
    check_config(config)
    context = prepare(config)
    run_epoch(context, 1)
    evaluate(context, 1)


@dataclass(frozen=True, kw_only=True)
class Signs(Group):
    """The signs of the built-in advantages, times a factor."""

    factor: float = 1.0

    def estimate(self, earned: EarnedBySamples) -> Tensor:
        expected = group_advantages(earned.scores, earned.groups, Normalizer())
        torch.testing.assert_close(earned.normalized(), expected)
        return expected.sign() * self.factor


def test_advantages_of_an_estimator_of_ones_own_are_trained_on(make_config: Make) -> None:
    context = prepare(make_config(f'advantage.estimator={{name: "{__name__}:Signs", options: {{factor: 0.5}}}}'))
    run_epoch(context, 1)
    table = artifact_table(context.store, context.chain.require(1, "advantage").ref)
    advantages = table.column("advantage").to_numpy()
    assert set(advantages) <= {-0.5, 0.0, 0.5}
    assert (advantages != 0).any()


class Wrong(Group):
    returned: Any = None

    def estimate(self, earned: EarnedBySamples) -> Any:
        return {"shape": earned.scores[:3], "nan": earned.scores / 0, "list": earned.scores.tolist()}[Wrong.returned]


@pytest.mark.parametrize(
    ("returned", "got"), [("shape", "of shape (3,)"), ("nan", "of shape (16,)"), ("list", "a list")]
)
def test_an_estimator_that_returns_something_else_is_named(
    make_config: Make, monkeypatch: pytest.MonkeyPatch, returned: str, got: str
) -> None:
    monkeypatch.setattr(Wrong, "returned", returned)
    context = prepare(make_config(f'advantage.estimator={{name: "{__name__}:Wrong"}}'))
    with pytest.raises(ConfigError, match="must return a tensor with a finite number") as error:
        run_epoch(context, 1)
    assert got in str(error.value)
