"""Branching against the naive nested loop: each branch sampled on its own."""

from __future__ import annotations

from functools import cache, partial
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flowmill.models.maths.branching import branch
from flowmill.models.maths.conditioning import Conditioning
from flowmill.models.maths.sampling import Sampler, grid_at
from flowmill.models.maths.schedules import BranchEveryStep
from flowmill.models.maths.solvers import Euler
from flowmill.models.maths.transitions import ODE, FlowSDE
from flowmill.models.policies.diffusion import DiffusionPolicy, DiffusionSettings
from flowmill.models.policies.parts import Part
from flowmill.models.policies.sd3 import SD3

PROMPTS = ['"12"', '"34"', '"56"']
STEPS = 5


@pytest.fixture(params=[1.0, 3.0], ids=["plain", "guided"])
def policy(request: pytest.FixtureRequest, tiny_base: Path) -> DiffusionPolicy:
    settings = DiffusionSettings(height=16, width=32, guidance_scale=request.param)
    return SD3.load(tiny_base, settings, frozenset(Part), {"max_sequence_length": 1, "schedule": "linear"})


def conditioning(policy: DiffusionPolicy) -> Conditioning:
    guided = policy.settings.guidance_scale > 1
    return Conditioning(policy.encode(PROMPTS), policy.encode([""] * 3) if guided else None)


def noise(step: int, number: int) -> Tensor:
    return torch.randn(3, 4, 8, 16, generator=torch.Generator().manual_seed(100 * step + number))


@torch.no_grad()
def naive(policy: DiffusionPolicy, latents: Tensor, at: tuple[int, int, int]) -> tuple[Tensor, ...]:
    """Sample one branch of one trunk by itself: trunk to the step, one drawn step, ODE to the end."""
    trunk, chosen, number = at
    sigmas = policy.sigmas(STEPS)
    cond = conditioning(policy).rows(torch.full((4,), trunk))
    x = latents[trunk].expand(4, *latents.shape[1:])  # four equal rows: kernels for one or two rows round differently
    kept: tuple[Tensor, ...] = ()
    for step in range(STEPS):
        grid = grid_at(sigmas, torch.full((4,), step))
        velocity = policy.velocity(x, grid.sigma, cond)
        if step == chosen:
            drawn = FlowSDE().step(x, velocity, grid)
            following = drawn.sample(noise(step, number)[trunk].expand_as(x))
            kept = (x[0], following[0], drawn.log_prob(following)[0])
            x = following
        else:
            x = ODE().step(x, velocity, grid).mean
    return (*kept, x[0])


def test_branches_equal_the_nested_loop(policy: DiffusionPolicy) -> None:
    latents = policy.initial_latents([torch.Generator().manual_seed(row) for row in range(3)])
    expected = cache(partial(naive, policy, latents))
    for steps, max_rows in product((None, (0, 2)), (4, 7, 64)):
        plan = BranchEveryStep(branches=2, steps=steps).draw(STEPS, 0, 1)
        made = branch(
            policy,
            conditioning(policy),
            latents,
            policy.sigmas(STEPS),
            sampler=Sampler(kernel=FlowSDE(), solver=Euler()),
            plan=plan,
            noise=noise,
            max_rows=max_rows,
        )
        assert len(made.final) == 3 * 2 * len(plan.trained)
        keys = list(zip(made.trunk.tolist(), made.step.tolist(), made.number.tolist(), strict=True))
        assert len(set(keys)) == len(keys)
        for row, key in enumerate(keys):
            ours = (made.before[row], made.after[row], made.log_probs[row], made.final[row])
            for left, right in zip(ours, expected(key), strict=True):
                # Kernels for other numbers of rows round differently, on some machines up to 1e-5 after five steps.
                torch.testing.assert_close(left, right, rtol=0, atol=3e-5)


def test_the_number_of_forwards_is_that_of_the_live_rows(policy: DiffusionPolicy) -> None:
    calls: list[int] = []
    velocity = policy.velocity

    def counted(latents: Tensor, *arguments: object) -> Tensor:
        calls.append(len(latents))
        return velocity(latents, *arguments)  # type: ignore[arg-type]

    policy.velocity = counted  # type: ignore[method-assign,assignment]
    plan = BranchEveryStep(branches=2).draw(STEPS, 0, 1)
    latents = policy.initial_latents([torch.Generator().manual_seed(row) for row in range(3)])
    arguments = {"sampler": Sampler(kernel=FlowSDE(), solver=Euler()), "plan": plan, "noise": noise}
    branch(policy, conditioning(policy), latents, policy.sigmas(STEPS), max_rows=27, **arguments)  # type: ignore[arg-type]
    # Live rows are 3, 9, 15, 21, 27: one forward per step.
    assert calls == [27] * STEPS


def test_a_plan_outside_the_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match="not steps of a schedule"):
        BranchEveryStep(steps=(9,)).draw(STEPS, 0, 1)
