"""Monitors: scored and plotted, never optimized; one that falls while the reward rises is told."""

from __future__ import annotations

import functools
import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from mlflow import MlflowClient

from flowmill.storage.trajectories.tables import read_rows
from flowmill.tasks.advantages.groups import contributions
from flowmill.tasks.algorithms.trends import (
    FALSE_ALARMS,
    LONGEST,
    _orders,
    chance_of_trend,
    correlation,
    ends,
    first_opposed,
    opposed_window,
    trend,
)
from flowmill.tasks.metrics.describe import describe_run
from flowmill.tasks.metrics.evaluations import rollout_reward
from flowmill.tasks.metrics.monitors import correlations, fallen_monitors, shares
from flowmill.tasks.metrics.reward_tables import earned
from flowmill.tasks.specs.graph import Node
from tests.conftest import FlowmillCommand
from tests.support.inside import Make, prepare, run_stage

MONITORS = (
    'monitors=[{name: "tests.support.rewards:brightness", label: bright}, '
    '{name: "tests.support.rewards:Constant", label: flat}]'
)
MODULE = "flowmill.tasks.metrics.monitors"


def test_trends_are_those_of_ranks() -> None:
    y = torch.tensor([1.0, 2.5, 2.0, 4.0, 4.5])
    # Nine pairs rise and one falls; S has the variance 5 * 4 * 15 / 18.
    assert trend(y) == pytest.approx((8 - 1) / (50 / 3) ** 0.5, rel=1e-9)
    assert trend(-y) == -trend(y)
    assert trend(torch.full((5,), 3.0)) == 0.0
    # Ties: six pairs say nothing, and the variance is less by 4 * 3 * 13 / 18.
    tied = torch.tensor([0.5, 0.5, 0.5, 0.5, 0.4, 0.29, 0.21])
    assert trend(tied) == pytest.approx(-(15 - 1) / (642 / 18) ** 0.5, rel=1e-9)
    assert ends(torch.arange(9.0)) == (0.5, 7.5)
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
    for node in context.plan.nodes():
        if node.epoch == 1 and node.stage in ("rollout", "score"):
            run_stage(context, node.stage, node.epoch, node.slot)
    found = shares(context.chain, 1)
    assert found.keys() == {"jpeg_compressibility", "bright"}
    assert sum(found.values()) == pytest.approx(1.0)
    single = prepare(make_config("run.name=single"))
    assert shares(single.chain, 1) == {}, "one reward is all of it"


def test_standardized_rewards_can_rise_too(make_config: Make) -> None:
    context = prepare(make_config("rewards=[{name: jpeg_compressibility, standardize: true, weight: 2}]"))
    for stage, slot in (("rollout", ""), ("score", "jpeg_compressibility"), ("advantage", "")):
        run_stage(context, stage, 1, slot)
    chain = context.chain
    summaries = [
        context.store.require(chain.require(1, *node).ref).summary
        for node in (("score", "jpeg_compressibility"), ("advantage", ""))
    ]
    assert summaries[1]["reward_mean"] == pytest.approx(0.0, abs=1e-6)
    assert rollout_reward(chain, 1) == 2 * summaries[0]["mean"] != 0
    assert earned(chain, 1) == f"reward sum {2 * summaries[0]['mean']:.3f}"
    assert rollout_reward(chain, 2) is None


def test_monitors_are_scored_and_change_nothing(make_config: Make) -> None:
    plain, watched = prepare(make_config()), prepare(make_config(MONITORS, "run.name=watched"))
    for context in (plain, watched):
        for node in context.plan.nodes():
            if node.epoch == 1 and node.stage in ("rollout", "score", "advantage", "optimize"):
                run_stage(context, node.stage, node.epoch, node.slot)
    same = ("rollout", "advantage", "optimize")
    assert [plain.chain.ref(Node(1, stage)) for stage in same] == [watched.chain.ref(Node(1, stage)) for stage in same]
    store = watched.store
    total = read_rows(store, watched.chain.require(1, "advantage").ref).column("reward").to_numpy()
    bright = read_rows(store, watched.chain.require(1, "score", "bright").ref).column("reward").to_numpy()
    expected = float(np.corrcoef(total, bright)[0, 1])
    found = correlations(watched.chain, 1)
    assert found == {"bright": pytest.approx(expected, rel=1e-5)}, "a constant follows nothing"
    assert describe_run(watched)["warnings"] == []


@pytest.mark.parametrize(
    ("rewards", "monitor", "after"),
    [
        ([0.1, 0.22, 0.29, 0.41, 0.5], [0.9, 0.81, 0.7, 0.62, 0.5], 5),
        ([0.1, 0.22, 0.29, 0.41, 0.5], [0.5, 0.62, 0.7, 0.81, 0.9], None),
        ([0.5, 0.41, 0.29, 0.22, 0.1], [0.9, 0.81, 0.7, 0.62, 0.5], None),
        ([0.1, 0.22, 0.29, 0.41], [0.9, 0.81, 0.7, 0.62], None),
        ([0.1, 0.5, 0.2, 0.4, 0.3, 0.35], [0.9, 0.5, 0.8, 0.6, 0.7, 0.6], None),
        ([0.5, 0.5, 0.5, 0.5, 0.6, 0.71, 0.79, 0.9, 1.0], [0.5, 0.5, 0.5, 0.5, 0.4, 0.29, 0.21, 0.1, 0.0], 7),
    ],
    ids=["opposed", "together", "both fall", "too few", "noise", "later"],
)
def test_what_falls_while_the_other_rises_is_found(
    rewards: list[float], monitor: list[float], after: int | None
) -> None:
    one, other = torch.tensor(rewards), torch.tensor(monitor)
    assert first_opposed(one, other) == after
    stops = [stop for stop in range(1, len(one) + 1) if opposed_window(one[:stop], other[:stop])]
    assert stops[:1] == ([] if after is None else [after])


@pytest.mark.parametrize("values", [[0, 1, 2, 3, 4], [0, 0, 1, 2, 3, 4], [0, 0, 0, 1, 1, 2], [3, 3, 3, 3, 3]], ids=str)
def test_chances_of_few_values_are_those_of_all_orders(values: list[float]) -> None:
    orders = sorted(itertools.permutations(values))
    fallen = [sum(a > b for a, b in itertools.combinations(order, 2)) for order in orders]
    for order, pairs in list(zip(orders, fallen, strict=True))[::17]:
        expected = sum(each >= pairs for each in fallen) / len(fallen)
        assert chance_of_trend(torch.tensor(order), -1) == pytest.approx(expected, rel=1e-12)
        assert chance_of_trend(-torch.tensor(order), 1) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("repeats", [(1,) * 8, (1,) * 16, (1,) * 32, (4, 4), (1, 1, 1, 1, 4, 4, 4, 4)], ids=str)
def test_the_tail_of_a_trend_is_no_lighter_than_that_of_all_orders(repeats: tuple[int, ...]) -> None:
    """Counted where there are too many to draw; S is 2 pairs less all that differ."""
    orders, count = _orders(repeats), sum(repeats)
    variance = (count * (count - 1) * (2 * count + 5) - sum(m * (m - 1) * (2 * m + 5) for m in repeats)) / 18
    for pairs in range(len(orders)):
        surplus = 2 * pairs - (len(orders) - 1)
        said = math.erfc((surplus - 1) / math.sqrt(2 * variance)) / 2
        if surplus > 1 and said <= 0.01:
            assert sum(orders[pairs:]) / sum(orders) <= said


@functools.cache
def alarms(kind: str, epochs: int, *, runs: int = 100, slope: float = 0.0, repeated: float = 0.0) -> float:
    """Return the share of runs in which a monitor is accused while the reward rises."""
    draw, found = np.random.default_rng([epochs, runs]), 0
    for _ in range(runs):
        noise = {
            "normal": draw.standard_normal(epochs),
            "heavy": draw.standard_t(2, epochs),
            "eighths": draw.binomial(8, 0.5, epochs) / 8.0,
        }[kind]
        for epoch in range(1, epochs):
            noise[epoch] = repeated * noise[epoch - 1] + (1 - repeated**2) ** 0.5 * noise[epoch]
        monitor = torch.tensor(noise - slope * np.arange(epochs))
        found += first_opposed(torch.arange(float(epochs)), monitor) is not None
    return found / runs


@pytest.mark.parametrize("epochs", [10, 40])
@pytest.mark.parametrize("kind", ["normal", "heavy", "eighths"])
def test_noise_is_accused_in_few_runs(kind: str, epochs: int) -> None:
    assert alarms(kind, epochs) <= FALSE_ALARMS


def test_a_monitor_that_falls_is_accused() -> None:
    """Slopes in standard deviations of an epoch's noise."""
    assert alarms("normal", 10, slope=1.0) >= 0.8
    assert alarms("normal", 30, slope=0.2) >= 0.9


def test_epochs_without_samples_of_a_monitor_are_left_out(monkeypatch: pytest.MonkeyPatch, make_config: Make) -> None:
    """A reward with ``sources`` has no mean where none of their prompts was drawn."""
    chain = prepare(make_config("monitors=[{name: pickscore, sources: [a]}]", "run.epochs=40")).chain
    means = {epoch: None if epoch in (1, 4, 9) else -0.1 * epoch for epoch in range(1, 13)}
    monkeypatch.setattr(f"{MODULE}.rollout_reward", lambda chain, epoch: 0.1 * epoch if epoch < 13 else None)
    monkeypatch.setattr(f"{MODULE}._mean", lambda chain, slot, epoch: means.get(epoch))
    ((slot, epoch, text),) = fallen_monitors(chain)
    counted = [each for each, mean in means.items() if mean is not None]
    count = first_opposed(torch.arange(9.0), -torch.arange(9.0))
    assert count is not None
    assert (slot, epoch) == ("pickscore", counted[count - 1])
    assert text.startswith(f"from epoch 2 to {epoch} the reward rose from 0.")


def test_a_reward_that_is_noise_accuses_nobody() -> None:
    draw = np.random.default_rng(0)
    found = [first_opposed(torch.tensor(draw.standard_normal(20)), -torch.arange(20.0)) is not None for _ in range(100)]
    assert sum(found) / 100 <= FALSE_ALARMS


def test_looks_are_paid_for_over_a_whole_run() -> None:
    fell = -torch.arange(5.0)
    assert opposed_window(-fell, fell) == 5
    # The same five means after another, with as many looks as there were epochs.
    later = torch.cat([fell[-1:], fell])
    assert opposed_window(-later, later) is None
    long = -torch.arange(200.0)
    assert opposed_window(-long, long) == LONGEST


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("epochs", "repeated", "slope", "least", "most"),
    [
        *[(epochs, 0.0, 0.0, 0.0, 0.05) for epochs in (10, 30, 100, 300)],
        *[(epochs, 0.3, 0.0, 0.0, 0.06) for epochs in (10, 30, 100)],
        *[(epochs, 0.5, 0.0, 0.0, 0.12) for epochs in (10, 30, 100)],
        *[(10, 0.0, 1.0, 0.8, 1.0), (20, 0.0, 0.5, 0.9, 1.0), (30, 0.0, 0.2, 0.9, 1.0), (60, 0.0, 0.1, 0.9, 1.0)],
    ],
)
def test_rates_and_power_are_those_of_the_docs(
    epochs: int, repeated: float, slope: float, least: float, most: float
) -> None:
    assert least <= alarms("normal", epochs, runs=1000, slope=slope, repeated=repeated) <= most


@pytest.mark.campaign
def test_a_reward_that_is_hacked_is_told_within_twelve_epochs(flowmill: FlowmillCommand, tmp_path: Path) -> None:
    """Brightness is gained by painting over the digits."""
    result = flowmill(
        *("run", "configs/digits.yaml", "--root", str(tmp_path), "--name", "hacked"),
        *("--set", 'rewards=[{name: "tests.support.rewards:brightness"}]', "--set", "monitors=[{name: digits}]"),
        *("--set", "evaluate.judges=[]", "--set", "run.epochs=12", "--set", "evaluate.every=12"),
        *("--set", "optimize.learning_rate=6e-4"),
    )
    assert "warning: from epoch" in result.stdout
    assert "while the monitor 'digits' fell from" in " ".join(result.stdout.split())
    assert "warning: from epoch" in flowmill("status", "hacked", "--root", str(tmp_path)).stdout
    (run,) = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db").search_runs(["1"])
    assert "**Warning**: from epoch" in run.data.tags["mlflow.note.content"]
    assert {"monitor/digits_mean", "monitor/digits_correlation"} <= run.data.metrics.keys()
