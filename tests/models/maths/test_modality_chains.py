"""A second schedule brought onto the first: the steps are those of each medium on its own."""

from __future__ import annotations

import pytest
import torch
from diffusers import MiniMaxH3Scheduler

from models.maths.kernels import CPS, FlowDDIM, Precise
from models.maths.modality_chains import Joined
from models.maths.transitions import ODE, FlowSDE, Kernel, grid_of

JOINED = Joined(12 / 3)


def schedules(steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the levels of both media in float64, of shifts 12 and 3."""
    t = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    return 12 * t / (1 + 11 * t), 3 * t / (1 + 2 * t)


def test_levels_are_those_of_the_second_schedule() -> None:
    first, second = (MiniMaxH3Scheduler(shift=shift) for shift in (12.0, 3.0))
    for scheduler in (first, second):
        scheduler.set_timesteps(9)
    torch.testing.assert_close(JOINED.level(first.sigmas), second.sigmas, rtol=0, atol=5e-7)
    # t = 1/2: odds of 12 and of 3.
    assert JOINED.level(torch.tensor(12 / 13, dtype=torch.float64)).item() == pytest.approx(3 / 4, abs=1e-12)
    assert JOINED.length(torch.tensor(12 / 13, dtype=torch.float64)).item() == pytest.approx(16 / 13, abs=1e-12)


def test_a_chain_is_a_flow_from_noise_to_longer_latents() -> None:
    clean, noise = torch.randn(2, 5, 7, dtype=torch.float64).unbind()
    sigma, level = (each[1:-1] for each in schedules(6))
    chain, own = [(1 - s[:, None]) * end + s[:, None] * noise for s, end in ((sigma, 4 * clean), (level, clean))]
    torch.testing.assert_close(JOINED.own(chain, sigma), own)
    torch.testing.assert_close(JOINED.velocity(chain, noise - clean, sigma), noise - 4 * clean)
    torch.testing.assert_close(JOINED.clean(4 * clean), clean)


@pytest.mark.parametrize("kernel", [ODE(), CPS(noise_level=0.8), FlowDDIM(eta=0.7), Precise(noise_level=0.7)], ids=repr)
def test_steps_that_keep_noise_levels_are_those_of_the_own_schedule(kernel: Kernel) -> None:
    sigmas, levels = schedules(6)
    # Not the first step, from pure noise, of which some kernels keep nothing, nor the last, which has no noise.
    grid, own_grid = (grid_of(each)[slice(1, 5)] for each in (sigmas, levels))
    chain, velocity = torch.randn(2, 4, 7, dtype=torch.float64).unbind()
    own = kernel.step(JOINED.own(chain, grid.sigma), velocity, own_grid)
    step = kernel.step(chain, JOINED.velocity(chain, velocity, grid.sigma), grid)
    torch.testing.assert_close(JOINED.own(step.mean, grid.sigma_next), own.mean)
    torch.testing.assert_close(step.std / JOINED.length(grid.sigma_next), own.std)


def test_the_flow_sde_has_the_mean_of_the_own_schedule_and_for_small_steps_its_noise() -> None:
    sigmas, levels = schedules(6)
    # The rule for sigma == 1 has no part in the steps behind the first.
    grid, own_grid = (grid_of(each)[slice(1, 6)] for each in (sigmas, levels))
    chain, velocity = torch.randn(2, 5, 7, dtype=torch.float64).unbind()
    own = FlowSDE().step(JOINED.own(chain, grid.sigma), velocity, own_grid)
    step = FlowSDE().step(chain, JOINED.velocity(chain, velocity, grid.sigma), grid)
    torch.testing.assert_close(JOINED.own(step.mean, grid.sigma_next), own.mean)
    before, after = JOINED.length(grid.sigma), JOINED.length(grid.sigma_next)
    torch.testing.assert_close(step.std / after, own.std * torch.sqrt(before / after))
