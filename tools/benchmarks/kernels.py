"""Branching against the naive nested loop, and advantages against a loop over groups, as ratios within one run."""

from __future__ import annotations

import sys
import time

import torch

from models.maths.branching import branch
from models.maths.conditioning import Conditioning
from models.maths.sampling import Sampler, grid_at
from models.maths.schedules import BranchEveryStep
from models.maths.solvers import Euler
from models.maths.transitions import ODE, FlowSDE
from models.policies.diffusion import DiffusionSettings
from models.policies.sd3 import SD3, SD3Options
from models.quickstart.pipeline import tiny_pipeline
from tasks.advantages.groups import Normalizer, group_advantages

_STEPS, _TRUNKS, _BRANCHES = 8, 4, 2


def branching() -> str:
    """Return CPU time of the nested loop over that of branching together, equal rows, best of three."""
    policy = SD3(
        tiny_pipeline(), DiffusionSettings(height=16, width=32), SD3Options(max_sequence_length=1, schedule="linear")
    )
    conditioning = Conditioning(policy.encode([f'"{n}{n}"' for n in range(_TRUNKS)]))
    latents = policy.initial_latents([torch.Generator().manual_seed(row) for row in range(_TRUNKS)])
    plan, sigmas = BranchEveryStep(branches=_BRANCHES).draw(_STEPS, 0, 1), policy.sigmas(_STEPS)
    noise = {(s, n): torch.randn_like(latents) for s in plan.trained for n in range(_BRANCHES)}

    def together() -> None:
        branch(
            policy,
            conditioning,
            latents,
            sigmas,
            sampler=Sampler(kernel=FlowSDE(), solver=Euler()),
            plan=plan,
            noise=lambda s, n: noise[s, n],
            max_rows=16,
        )

    @torch.no_grad()
    def nested() -> None:
        x = latents
        for step in range(_STEPS):
            grid = grid_at(sigmas, torch.full((_TRUNKS,), step))
            velocity = policy.velocity(x, grid.sigma, conditioning)
            for number in range(_BRANCHES if step in plan.trained else 0):
                y = FlowSDE().step(x, velocity, grid).sample(noise[step, number])
                for later in range(step + 1, _STEPS):
                    at = grid_at(sigmas, torch.full((_TRUNKS,), later))
                    y = ODE().step(y, policy.velocity(y, at.sigma, conditioning), at).mean
            x = ODE().step(x, velocity, grid).mean

    return f"branching: nested loop / together = {_best(nested) / _best(together):.1f} x CPU time"


def advantages(count: int = 10_000_000) -> str:
    """Return how long the advantages of ten million samples take, and a mask per group extrapolated."""
    rewards, groups = torch.rand(count), torch.arange(count) // 16
    seconds = _best(lambda: group_advantages(rewards, groups, Normalizer()), repeats=1)
    some = 60
    loop = _best(lambda: [rewards[groups == group].std() for group in range(some)], repeats=1) * (count / 16 / some)
    return f"advantages: {count:,} samples in {seconds:.1f} CPU s; a mask per group would take {loop / seconds:,.0f} x"


def _best(function: object, repeats: int = 3) -> float:
    times = []
    for _ in range(repeats):
        begun = time.process_time()
        function()  # type: ignore[operator]
        times.append(time.process_time() - begun)
    return min(times)


def table() -> str:
    """Return both."""
    torch.set_num_threads(1)
    return f"- {branching()}\n- {advantages()}\n"


if __name__ == "__main__":
    sys.stdout.write(table())
