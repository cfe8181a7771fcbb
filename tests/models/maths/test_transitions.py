from __future__ import annotations

import math

import pytest
import torch

from flowmill.configs.errors import ConfigError
from flowmill.configs.registry import create
from flowmill.models.maths import KERNELS
from flowmill.models.maths.schedules import AllSteps
from flowmill.models.maths.transitions import ODE, FlowSDE, Gaussian, Grid, gaussian_kl, log_ratio

ROWS = torch.tensor([1.0, 0.75, 0.5, 0.25], dtype=torch.float64)


def grid(sigma: torch.Tensor = ROWS, dt: float = -0.25, second: float = 0.75) -> Grid:
    return Grid(sigma, sigma + dt, torch.full_like(sigma, second))


def tensors(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, v = (torch.randn(4, *shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, v


def test_one_step_by_hand() -> None:
    # sigma .5 -> .25, a = .6: s = .6; mean = 1 + (2 + .36 / 1 * (1 + .5 * 2)) * -.25 = .32; std = .6 * .5.
    where = Grid(torch.tensor([0.5]), torch.tensor([0.25]), torch.tensor([0.75]))
    step = FlowSDE(0.6).step(torch.tensor([[1.0]]), torch.tensor([[2.0]]), where)
    assert step.mean.item() == pytest.approx(0.32, abs=1e-7)
    assert step.std.item() == pytest.approx(0.3, abs=1e-7)
    at_mean = step.log_prob(step.mean).item()
    assert at_mean == pytest.approx(-math.log(0.3) - 0.5 * math.log(2 * math.pi), abs=1e-6)


def test_little_noise_is_the_ode_step() -> None:
    x, v = tensors(4, 3, 3)
    sde, ode = FlowSDE(1e-6).step(x, v, grid()), ODE().step(x, v, grid())
    torch.testing.assert_close(sde.mean, ode.mean, rtol=0, atol=1e-10)
    assert float(ode.std.abs().max()) == 0


def test_log_prob_is_the_normal_density_averaged_over_dims() -> None:
    x, v = tensors(4, 3, 3)
    step = FlowSDE().step(x, v, grid())
    value = x + 0.1
    normal = torch.distributions.Normal(step.mean, step.std.view(-1, 1, 1, 1))
    torch.testing.assert_close(step.log_prob(value), normal.log_prob(value).flatten(1).mean(1))


def test_sigma_one_uses_the_second_grid_value() -> None:
    where = grid()
    torch.testing.assert_close(FlowSDE(0.7).scale(where)[0], torch.tensor(0.7 / math.sqrt(0.25), dtype=torch.float64))
    torch.testing.assert_close(FlowSDE(0.7).scale(where)[1], torch.tensor(0.7 * math.sqrt(3), dtype=torch.float64))


@pytest.mark.parametrize("start", [0.999999, 0.9999, 0.995])
def test_a_grid_that_starts_just_below_one_does_not_explode(start: float) -> None:
    scale = FlowSDE(0.7).scale(grid(torch.tensor([start, 0.75], dtype=torch.float64)))
    assert float(scale[0]) == pytest.approx(0.7 * math.sqrt(start / 0.25), rel=1e-9)


def test_a_fine_grid_above_the_threshold_is_left_alone() -> None:
    sigma = torch.tensor([0.995], dtype=torch.float64)
    scale = FlowSDE(1.0).scale(Grid(sigma, sigma - 0.001, torch.tensor([0.999], dtype=torch.float64)))
    assert float(scale[0]) == pytest.approx(math.sqrt(0.995 / 0.005))


def test_a_sigma_at_the_threshold_is_left_alone() -> None:
    sigma = torch.tensor([0.99], dtype=torch.float64)
    scale = FlowSDE(1.0).scale(Grid(sigma, sigma - 0.1, torch.tensor([0.5], dtype=torch.float64)))
    assert float(scale[0]) == pytest.approx(math.sqrt(0.99 / 0.01))


def test_rows_have_their_own_sigma() -> None:
    x, v = tensors(4, 3, 3)
    together = FlowSDE().step(x, v, grid())
    for row in range(4):
        alone = FlowSDE().step(x[row : row + 1], v[row : row + 1], grid()[slice(row, row + 1)])
        torch.testing.assert_close(together.mean[row : row + 1], alone.mean, rtol=0, atol=0)


def test_kl_agrees_with_torch_and_with_sampling() -> None:
    generator = torch.Generator().manual_seed(0)
    old = Gaussian(torch.zeros(1, 5, dtype=torch.float64), torch.tensor([0.3], dtype=torch.float64))
    new = Gaussian(torch.full((1, 5), 0.1, dtype=torch.float64), old.std)
    exact = gaussian_kl(new, old)
    normals = [torch.distributions.Normal(each.mean, each.std) for each in (new, old)]
    torch.testing.assert_close(exact, torch.distributions.kl_divergence(*normals).mean(1))
    draws = new.mean + new.std * torch.randn(100_000, 5, generator=generator, dtype=torch.float64)
    ratios = new.log_prob(draws) - old.log_prob(draws)
    error = float(ratios.std() / math.sqrt(len(ratios)))
    assert abs(float(ratios.mean() - exact)) < 4 * error


def test_the_log_ratio_of_means_is_the_difference_of_log_probs_and_holds_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(4, 4096, generator=generator, dtype=torch.float64)
    new, std = (
        old + 1e-4 * torch.randn(4, 4096, generator=generator, dtype=torch.float64),
        torch.full((4,), 0.4).double(),
    )
    value = old + 0.4 * torch.randn(4, 4096, generator=generator, dtype=torch.float64)
    exact = Gaussian(new, std).log_prob(value) - Gaussian(old, std).log_prob(value)
    torch.testing.assert_close(log_ratio(Gaussian(new, std), old, value), exact, rtol=1e-9, atol=1e-13)
    n, o, v, s = (t.float() for t in (new, old, value, std))
    stable = log_ratio(Gaussian(n, s), o, v).double()
    subtracted = (Gaussian(n, s).log_prob(v) - Gaussian(o, s).log_prob(v)).double()
    assert float((stable - exact).abs().max()) < float((subtracted - exact).abs().max())


def test_noise_level_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="Use sampler 'ode'"):
        create(KERNELS, "flow_sde", {"noise_level": 0.0}, label="rollout.sampler")


@pytest.mark.parametrize(
    ("last", "stochastic", "trained", "states"),
    [
        ("ode", (0, 1), (0, 1), (0, 1, 2)),
        ("sde", (0, 1, 2), (0, 1), (0, 1, 2)),
        ("train", (0, 1, 2), (0, 1, 2), (0, 1, 2, 3)),
    ],
)
def test_all_steps_plan(last: str, stochastic: tuple, trained: tuple, states: tuple) -> None:
    steps = AllSteps(last=last).draw(3, seed=1, epoch=1)  # type: ignore[arg-type]
    assert (steps.stochastic, steps.trained, steps.states) == (stochastic, trained, states)
