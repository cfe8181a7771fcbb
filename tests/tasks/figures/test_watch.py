"""Monitors: scored and plotted, never optimized; one that falls while the reward rises is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from mlflow import MlflowClient

from configs.errors import ConfigError
from configs.schema import RunConfig
from storage.tables import read_rows
from tasks.advantages.groups import contributions
from tasks.algorithms.trends import correlation, first_opposed, opposes, trend
from tasks.figures.describe import describe_run
from tasks.figures.watch import correlations, read_scored, shares
from tasks.identities.nodes import Node, run_nodes
from tasks.preflight.check import check_config
from tasks.stages.stage_run import StageRun
from tests.conftest import FlowmillCommand
from tests.support.inside import make_stage, prepare

Make = Callable[..., RunConfig]
MONITORS = (
    'monitors=[{name: "tests.support.rewards:brightness", label: bright}, '
    '{name: "tests.support.rewards:Constant", label: flat}]'
)


def test_trends_are_those_of_least_squares() -> None:
    y = torch.tensor([1.0, 2.5, 2.0, 4.0, 4.5])
    x = np.arange(5.0)
    (slope, _), covariance = np.polyfit(x, y.numpy(), 1, cov=True)
    assert trend(y) == pytest.approx(slope / covariance[0, 0] ** 0.5, rel=1e-9)
    assert trend(-y) == -trend(y)
    assert trend(torch.full((5,), 3.0)) == 0.0
    assert trend(torch.tensor([1.0, 2.0, 3.0, 4.0])) == float("inf")
    assert correlation(y, -2 * y + 1) == pytest.approx(-1.0)
    assert correlation(y, torch.full((5,), 0.7)) is None
    other = torch.tensor([2.0, 1.0, 5.0, 3.0, 3.5])
    assert correlation(y, other) == pytest.approx(float(np.corrcoef(y, other)[0, 1]), rel=1e-9)


def test_shares_are_of_what_differs_within_groups() -> None:
    groups = torch.tensor([0, 0, 1, 1])
    first, level = torch.tensor([0.0, 2.0, 1.0, 1.0]), torch.tensor([9.0, 9.0, -9.0, -9.0])
    assert contributions([first, level], groups) == [1.0, 0.0]
    assert contributions([first, 3 * first], groups) == [0.25, 0.75]
    assert contributions([2 * first, -first], groups) == [2.0, -1.0]
    assert contributions([level], groups) is None
    assert contributions([torch.full((6,), 0.7)], torch.tensor([0, 0, 0, 1, 1, 1])) is None


def test_what_each_reward_contributes_is_logged(make_config: Make) -> None:
    rewards = (
        'rewards=[{name: jpeg_compressibility}, {name: "tests.support.rewards:brightness", label: bright, weight: 3}]'
    )
    context = prepare(make_config(rewards))
    for node in run_nodes(context.config):
        if node.epoch == 1 and node.stage in ("rollout", "score"):
            StageRun(make_stage(context, node.stage, node.epoch, node.slot)).execute()
    found = shares(read_scored(context.chain, 1), context.config.rewards)
    assert found.keys() == {"jpeg_compressibility", "bright"}
    assert sum(found.values()) == pytest.approx(1.0)
    single = prepare(make_config("run.name=single"))
    assert shares(read_scored(single.chain, 1), single.config.rewards) == {}, "one reward is all of it"


def test_monitors_are_scored_and_change_nothing(make_config: Make) -> None:
    plain, watched = prepare(make_config()), prepare(make_config(MONITORS, "run.name=watched"))
    for context in (plain, watched):
        for node in run_nodes(context.config):
            if node.epoch == 1 and node.stage in ("rollout", "score", "advantage", "optimize"):
                StageRun(make_stage(context, node.stage, node.epoch, node.slot)).execute()
    same = ("rollout", "advantage", "optimize")
    assert [plain.chain.ref(Node(1, stage)) for stage in same] == [watched.chain.ref(Node(1, stage)) for stage in same]
    store = watched.store
    total = read_rows(store, watched.chain.require(1, "advantage").ref).column("reward").to_numpy()
    bright = read_rows(store, watched.chain.require(1, "score", "bright").ref).column("reward").to_numpy()
    expected = float(np.corrcoef(total, bright)[0, 1])
    found = correlations(read_scored(watched.chain, 1))
    assert found == {"bright": pytest.approx(expected, rel=1e-5)}, "a constant follows nothing"
    assert describe_run(watched)["warnings"] == []


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["monitors=[{name: jpeg_incompressibility, weight: 2}]"],
            "has weight 2.0, but what is listed there is",
        ),
        (["monitors=[{name: jpeg_compressibility}]"], "appears 2 times"),
        (["monitors=[{name: jpeg}]"], "Did you mean 'jpeg_"),
    ],
)
def test_monitors_that_cannot_work_are_refused(make_config: Make, overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_config(make_config(*overrides))


@pytest.mark.parametrize(
    ("rewards", "monitor", "after"),
    [
        ([0.1, 0.22, 0.29, 0.41, 0.5], [0.9, 0.81, 0.7, 0.62, 0.5], 4),
        ([0.1, 0.22, 0.29, 0.41, 0.5], [0.5, 0.62, 0.7, 0.81, 0.9], None),
        ([0.5, 0.41, 0.29, 0.22, 0.1], [0.9, 0.81, 0.7, 0.62, 0.5], None),
        ([0.1, 0.22, 0.29], [0.9, 0.81, 0.7], None),
        ([0.1, 0.5, 0.2, 0.4, 0.3, 0.35], [0.9, 0.5, 0.8, 0.6, 0.7, 0.6], None),
        ([0.5, 0.5, 0.5, 0.5, 0.6, 0.71, 0.79], [0.5, 0.5, 0.5, 0.5, 0.4, 0.29, 0.21], 6),
    ],
    ids=["opposed", "together", "both fall", "too few", "noise", "later"],
)
def test_what_falls_while_the_other_rises_is_found(
    rewards: list[float], monitor: list[float], after: int | None
) -> None:
    one, other = torch.tensor(rewards), torch.tensor(monitor)
    assert first_opposed(one, other) == after
    assert [stop for stop in range(1, len(one)) if opposes(one[:stop], other[:stop])][:1] in ([], [after])


@pytest.mark.campaign
def test_a_reward_that_is_hacked_is_told_within_five_epochs(flowmill: FlowmillCommand, tmp_path: Path) -> None:
    """Brightness is gained by painting over the digits."""
    result = flowmill(
        *("run", "configs/digits.yaml", "--root", str(tmp_path), "--name", "hacked"),
        *("--set", 'rewards=[{name: "tests.support.rewards:brightness"}]', "--set", "monitors=[{name: digits}]"),
        *("--set", "evaluate.judges=[]", "--set", "run.epochs=5", "--set", "evaluate.every=5"),
        *("--set", "optimize.learning_rate=6e-4"),
    )
    assert "warning: from epoch" in result.stdout
    assert "while the monitor 'digits' fell from" in " ".join(result.stdout.split())
    assert "warning: from epoch" in flowmill("status", "hacked", "--root", str(tmp_path)).stdout
    (run,) = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db").search_runs(["1"])
    assert "**Warning**: from epoch" in run.data.tags["mlflow.note.content"]
    assert {"monitor/digits_mean", "monitor/digits_correlation"} <= run.data.metrics.keys()
