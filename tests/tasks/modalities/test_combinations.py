"""Samplers, plans, algorithms and advantages against each other: refused by check with a remedy, or trained right."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from flowmill.models import maths
from flowmill.models.maths import KERNELS
from flowmill.tasks import algorithms
from tests.support.combinations import (
    ADVANTAGES,
    ALGORITHMS,
    PLANS,
    RATIOS,
    SAMPLERS,
    Bench,
    Case,
    every_case,
    make_models,
    run,
    some_cases,
)

REMEDY = re.compile(r"\b(Set|Use|Choose|Lower|Raise|Remove|Change|Leave|Give)\b[^.]*\S*.*\.$")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("combinations")
    return Bench(*make_models(folder), folder)


def test_every_component_is_crossed() -> None:
    assert {name for name, _ in SAMPLERS.values()} == set(KERNELS)
    assert {name for name, _ in PLANS.values()} == set(maths.PLANS)
    assert {name for name, _ in ALGORITHMS.values()} == set(algorithms.ALGORITHMS)
    assert set(algorithms.ALGORITHMS) >= RATIOS
    cases = {(case.sampler, case.plan, case.algorithm) for case in some_cases()}
    assert cases == set(itertools.product(SAMPLERS, PLANS, ALGORITHMS))
    assert {case.advantage for case in some_cases()} == set(range(len(ADVANTAGES)))
    assert sum(1 for _ in every_case()) == len(cases) * len(ADVANTAGES)
    parts = [{(case.sampler, case.plan) for case in every_case(part, 3)} for part in range(3)]
    assert set.union(*parts) == set(itertools.product(SAMPLERS, PLANS))
    assert sum(len(part) for part in parts) == len(SAMPLERS) * len(PLANS)


@pytest.mark.slow
@pytest.mark.parametrize("every", [50, pytest.param(1, marks=pytest.mark.campaign)])
def test_all_of_them_are_refused_with_a_remedy_or_trained_right(bench: Bench, every: int) -> None:
    cases = some_cases()[::every]
    tally = run(bench, cases)
    assert not tally.wrong
    assert tally.trained + sum(tally.refused.values()) == len(cases)
    assert tally.trained > 200 / every
    for message in tally.examples.values():
        assert REMEDY.search(message), message


def case(sampler: str = "flow_sde", plan: str = "all", algorithm: str = "grpo", **advantage: Any) -> Case:
    wanted = {"std": "group", "aggregation": "sum", "mode": "all", "best_of": None, **advantage}
    numbers = [i for i, options in enumerate(ADVANTAGES) if wanted.items() <= {"kl_coef": 0, **options}.items()]
    return Case(sampler=sampler, plan=plan, algorithm=algorithm, advantage=numbers[0])


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (case("ode"), "needs log-probs of stochastic steps"),
        (case("ode", algorithm="nft"), "does not store them. Set rollout.plan to 'final'"),
        (case("ode", "all, last trained", "nft"), "trains step 0 of rollout.steps 3"),
        (case("cps", "all, last trained"), "trains step 2 of rollout.steps 3 (counted from 0), but rollout.sampler"),
        (case("ddim", "window to the end"), "'ddim' has no noise there (std 0.0e+00)"),
        (case("cps", "subset with the last"), "Leave the last step out of the plan"),
        (case("ddim", "branch at the last"), "a step without noise has no log-prob"),
        (case("cps squared", algorithm="grpo_guard"), "with log_prob 'squared' leaves their scale out"),
        (case("cps squared", algorithm="grpo, from means"), "Set rollout.sampler.options.log_prob to 'gaussian'"),
        (case("cps squared", algorithm="grpo, sums"), "compares Gaussian densities"),
        (case(plan="window to the end", algorithm="nft"), "does not store those of every sample"),
        (case(plan="branch", algorithm="dgpo"), "needs the final latents of a rollout"),
        (case(plan="final"), "trains none. Set rollout.plan to 'all'"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_refusals(bench: Bench, one: Case, expected: str) -> None:
    assert expected in (bench.refusal(one) or "trained")


@pytest.mark.parametrize(
    "one",
    [
        case(),
        case("cps squared"),
        case("cps squared", algorithm="flow_dppo"),
        case("flow_sde", "all, last trained", "nft"),
        case("wan_sde", "subset with the last", "tempflow"),
        case("dance_sde", "branch at the last", "crd"),
        case("ode", "final", "dpo", mode="best_worst"),
        case(plan="branch", algorithm="tempflow", std="running"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_can_work_is_not_refused(bench: Bench, one: Case) -> None:
    assert bench.refusal(one) is None
