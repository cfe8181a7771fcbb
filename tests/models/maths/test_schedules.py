from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowmill.configs.errors import ConfigError
from flowmill.configs.registry import create
from flowmill.configs.schema import RunConfig
from flowmill.models.maths import KERNELS, PLANS
from flowmill.models.maths.schedules import AllSteps, BranchEveryStep, FinalOnly, RandomFraction, Subset, Window
from flowmill.tasks.checks.check import check_config
from flowmill.tasks.inputs.components import open_trajectory_store
from flowmill.tasks.runs.context import RunContext
from tests.support.inside import prepare, run_epoch, run_stage


@given(st.integers(2, 30), st.integers(0, 2**62), st.integers(1, 9))
def test_plans_stay_within_the_schedule_and_depend_on_their_seed_only(steps: int, seed: int, epoch: int) -> None:
    for plan in (
        AllSteps(),
        Window(size=1),
        Subset(count=1),
        FinalOnly(),
        Window(size=1, mode="progressive"),
        RandomFraction(fraction=1.0),
    ):
        drawn = plan.draw(steps, seed, epoch)
        assert drawn == plan.draw(steps, seed, epoch)
        assert set(drawn.trained) <= set(drawn.stochastic) <= set(range(steps))
        assert set(drawn.states) <= set(range(steps + 1))
        assert all(step in drawn.states and step + 1 in drawn.states for step in drawn.trained)


def test_random_windows_take_every_position_and_never_the_last_step() -> None:
    drawn = {Window(size=3).draw(8, seed, 1).trained for seed in range(300)}
    assert drawn == {tuple(range(start, start + 3)) for start in range(5)}


def test_progressive_windows_slide_and_start_again() -> None:
    plan = Window(size=2, low=1, high=6, mode="progressive", stride=2, epochs_per_shift=3)
    starts = [plan.draw(8, seed, epoch).trained[0] for seed, epoch in enumerate(range(1, 10))]
    assert starts == [1, 1, 1, 3, 3, 3, 1, 1, 1]
    mixed = Window(size=4, low=0, high=10, mode="progressive", stride=3)
    assert [mixed.draw(25, 0, epoch).trained[0] for epoch in range(1, 8)] == [0, 3, 6, 0, 3, 6, 0]
    assert Window(size=2, mode="fixed", low=3).draw(8, 5, 7).trained == (3, 4)


def test_a_window_may_reach_the_end_of_the_schedule_and_no_further() -> None:
    drawn = {Window(size=2, low=5, high=8).draw(8, seed, 1).trained for seed in range(50)}
    assert drawn == {(5, 6), (6, 7)}
    with pytest.raises(ValueError, match=r"does not fit into \[5, 9\) of rollout.steps 8"):
        Window(size=2, low=5, high=9).draw(8, 0, 1)


def test_subsets_are_drawn_from_their_candidates() -> None:
    drawn = {Subset(count=2, candidates=(1, 2, 5)).draw(8, seed, 1).trained for seed in range(100)}
    assert drawn == {(1, 2), (1, 5), (2, 5)}
    assert Subset(count=1, candidates=(5,)).draw(8, 0, 1).states == (5, 6)


def test_the_final_state_alone() -> None:
    steps = FinalOnly().draw(8, 0, 1)
    assert (steps.stochastic, steps.trained, steps.states) == ((), (), (8,))


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (Window(size=9), "does not fit into"),
        (Window(size=2, low=7), "does not fit into"),
        (Window(size=2, high=20), "does not fit into"),
        (Subset(count=9), "cannot be drawn"),
        (Subset(count=1, candidates=(8,)), "cannot be drawn"),
        (Subset(count=3, candidates=(1, 2)), "cannot be drawn"),
        (BranchEveryStep(steps=(9,)), "not steps of a schedule"),
        (RandomFraction(fraction=0.1), "0.1 of the 7 steps before the last of rollout.steps 8 is none"),
    ],
)
def test_plans_that_do_not_fit_say_so(plan: Window, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        plan.draw(8, 0, 1)


def test_options_are_checked() -> None:
    for options, expected in (({"mode": "sideways"}, "must be 'random'"), ({"size": 0}, "greater than 0")):
        with pytest.raises(ConfigError, match=expected):
            create(PLANS, "window", options, label="rollout.plan")


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("subset", {"candidates": [1, 3, 1]}, r"is \[1, 3, 1\]; it holds step 1 more than once. Remove it\.$"),
        ("subset", {"count": 0}, "count is 0; it must be greater than 0"),
        ("branch", {"steps": [2, 2]}, r"steps is \[2, 2\]; it holds step 2 more than once"),
        ("fraction", {"fraction": 0.0}, "must be greater than 0"),
        ("fraction", {"fraction": 1.01}, "must be less than or equal to 1"),
        ("fraction", {"last": "train"}, "last is 'train'; it must be 'ode' or 'sde'"),
        ("fraction", {"fraction": float("nan")}, "must be a finite number"),
        ("window", {"stride": 0}, "greater than 0"),
        ("window", {"low": -1}, "low is -1; it must be greater than or equal to 0"),
    ],
)
def test_plans_refuse_options_that_cannot_work(name: str, options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        create(PLANS, name, options, label="rollout.plan")


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("ddim", {"eta": 1.0001}, r"eta is 1\.0001; it must be less than or equal to 1\."),
        ("ddim", {"eta": 0}, "must be greater than 0. Use sampler 'ode' for no noise"),
        ("cps", {"noise_level": 2.5}, r"noise_level is 2\.5; it must be less than or equal to 2"),
        ("cps", {"noise_level": -0.5}, "must be greater than 0"),
        ("flow_sde", {"noise_level": float("inf")}, "noise_level is inf; it must be a finite number"),
        ("flow_sde", {"noise_level": float("nan")}, "must be a finite number"),
        ("dance_sde", {"eta": float("inf")}, "eta is inf; it must be a finite number"),
    ],
)
def test_kernels_refuse_noise_that_cannot_work(name: str, options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        create(KERNELS, name, options, label="rollout.sampler")


def test_the_largest_noise_is_accepted() -> None:
    assert create(KERNELS, "ddim", {"eta": 1}, label="").eta == 1
    assert create(KERNELS, "cps", {"noise_level": 1}, label="").noise_level == 1
    assert create(KERNELS, "flow_sde", {"noise_level": 3}, label="").noise_level == 3


def test_a_random_part_of_the_steps_is_trained_while_all_are_stochastic() -> None:
    plan = RandomFraction(fraction=0.6)
    drawn = [plan.draw(16, seed, 1) for seed in range(400)]
    # DanceGRPO: int(0.6 * (16 - 1)) of the fifteen steps before the last.
    assert {len(steps.trained) for steps in drawn} == {9}
    assert {steps.stochastic for steps in drawn} == {tuple(range(15))}
    assert RandomFraction(last="sde").draw(16, 0, 1).stochastic == tuple(range(16))
    assert RandomFraction(last="sde").draw(16, 0, 1).trained == plan.draw(16, 0, 1).trained
    counts = [sum(step in steps.trained for steps in drawn) for step in range(16)]
    assert counts[15] == 0
    # Binomial with mean 240 and std 9.8.
    assert all(240 - 40 < count < 240 + 40 for count in counts[:15])
    assert plan.draw(16, 1, 1).trained != plan.draw(16, 2, 1).trained
    assert len(RandomFraction(fraction=0.29).draw(101, 0, 1).trained) == 28
    assert RandomFraction(fraction=1.0).draw(4, 0, 1).trained == (0, 1, 2)


def test_only_what_is_trained_is_stored() -> None:
    for seed in range(20):
        steps = RandomFraction(fraction=0.3).draw(8, seed, 1)
        assert set(steps.states) == {step + offset for step in steps.trained for offset in (0, 1)}


def test_branches_leave_at_the_steps_named() -> None:
    steps = BranchEveryStep(branches=2, steps=(3, 1)).draw(8, 0, 1)
    assert (steps.trained, steps.stochastic, steps.branches) == ((1, 3), (1, 3), 2)


def stored_steps(context: RunContext) -> dict[str, dict[str, tuple[tuple[int, ...], int]]]:
    """Return the trained steps and the number of stored latents of every sample, by prompt."""
    ref = context.chain.require(1, "rollout").ref
    found: dict[str, dict[str, tuple[tuple[int, ...], int]]] = {}
    for record in context.store.records(ref):
        shard = open_trajectory_store("webdataset").open(context.store.files(ref, record))
        for row, columns in enumerate(shard.table.to_pylist()):
            states = columns["states"]
            assert len(columns["log_probs"]) == len(columns["steps"])
            assert set(states) == {state for step in columns["steps"] for state in (step, step + 1)}
            assert all(np.abs(latents).max() > 0 for latents in shard.array("latents", row))
            found.setdefault(columns["prompt_id"], {})[columns["sample_id"]] = (
                tuple(columns["steps"]),
                len(shard.array("latents", row)) - len(states),
            )
    return found


def test_each_sample_trains_its_own_part_of_the_steps(make_config: Callable[..., RunConfig]) -> None:
    config = make_config("rollout.steps=6", "rollout.plan={name: fraction, options: {fraction: 0.5}}")
    check_config(config)
    context = prepare(config)
    run_epoch(context, 1)
    by_prompt = stored_steps(context)
    drawn = [steps for group in by_prompt.values() for steps, _ in group.values()]
    assert {len(steps) for steps in drawn} == {2}
    assert all(step < 5 for steps in drawn for step in steps)
    assert any(len({steps for steps, _ in group.values()}) > 1 for group in by_prompt.values())
    assert all(surplus == 0 for group in by_prompt.values() for _, surplus in group.values())
    first = context.store.require(context.policy_ref(1)).summary["updates"][0]
    # What was stored is what is replayed, whichever steps they were.
    assert first["replay_gap_max"] < 1e-6


def test_subsets_that_store_different_numbers_of_latents_share_a_batch(make_config: Callable[..., RunConfig]) -> None:
    context = prepare(make_config("rollout.steps=6", "rollout.plan={name: subset, options: {count: 2}}"))
    run_stage(context, "rollout", 1)
    by_prompt = stored_steps(context)
    drawn = {steps for group in by_prompt.values() for steps, _ in group.values()}
    # Neighbors store three latents, others four.
    assert {second - first == 1 for first, second in drawn} == {True, False}
    assert all(len({steps for steps, _ in group.values()}) == 1 for group in by_prompt.values())
    assert all(surplus == 0 for group in by_prompt.values() for _, surplus in group.values())
