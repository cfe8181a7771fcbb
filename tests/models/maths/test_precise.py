"""The Precise step against the SDE it solves, against CPS, and what rollouts by each sampler make of a known law."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
from torch import Tensor

from flowmill.models.maths.kernels import CPS, DanceSDE, Precise
from flowmill.models.maths.transitions import ODE, FlowSDE, Gaussian, Grid, Kernel, grid_of

Noise = Literal["flow", "dance"]


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def grid(sigma: Tensor, following: Tensor) -> Grid:
    return Grid(sigma, following, torch.full_like(sigma, 0.9))


def stepped(kernel: Kernel, sigma: float, following: float, clean: float, noise: float) -> Gaussian:
    """Return a step from where clean and noise meet, with the velocity between them."""
    at = vector(sigma)[:, None]
    return kernel.step((1 - at) * clean + at * noise, at * 0 + noise - clean, grid(vector(sigma), vector(following)))


@pytest.mark.parametrize(("noise", "level"), [("flow", 0.7), ("flow", 1.2), ("dance", 0.3), ("dance", 1.0)])
@pytest.mark.parametrize(("sigma", "following"), [(0.9, 0.7), (0.5, 0.2), (0.3, 0.05)])
def test_it_is_the_sde_with_the_image_held_fixed(noise: Noise, level: float, sigma: float, following: float) -> None:
    clean, eps = 0.7, -1.3
    mean, variance, count = (1 - sigma) * clean + sigma * eps, 0.0, 20_000
    dt = (following - sigma) / count
    for number in range(count):
        u = sigma + (number + 0.5) * dt
        g2 = level**2 * (u / (1 - u) if noise == "flow" else 1.0)
        # dx = [v + g^2 / (2 u) eps^] dt + g dw with eps^ = (x - (1 - u) x0) / u and v = eps^ - x0.
        slope, rest = 1 / u + g2 / (2 * u**2), -clean / u - g2 * (1 - u) * clean / (2 * u**2)
        mean, variance = mean + dt * (slope * mean + rest), variance * (1 + dt * slope) ** 2 - dt * g2
    step = stepped(Precise(level, noise), sigma, following, clean, eps)
    assert float(step.mean) == pytest.approx(mean, abs=2e-4)
    assert float(step.std) == pytest.approx(math.sqrt(variance), rel=1e-3)


@pytest.mark.parametrize("noise", ["flow", "dance"])
def test_it_is_cps_with_noise_that_depends_on_the_step(noise: Noise) -> None:
    kernel = Precise(0.5, noise)
    for sigma, following in ((0.9, 0.7), (0.5, 0.45), (0.3, 0.05)):
        rho = float(kernel.rho_of(grid(vector(sigma), vector(following))))
        same = CPS(2 / math.pi * math.asin(math.sqrt(1 - rho**2)))
        ours, theirs = (stepped(each, sigma, following, 0.4, 1.1) for each in (kernel, same))
        torch.testing.assert_close((ours.mean, ours.std), (theirs.mean, theirs.std))
    # Two short steps keep as much of the noise as a long one.
    rho = [float(kernel.rho_of(grid(vector(a), vector(b)))) for a, b in ((0.8, 0.5), (0.8, 0.6), (0.6, 0.5))]
    assert rho[0] == pytest.approx(rho[1] * rho[2], rel=1e-12)


def test_ends_of_a_schedule() -> None:
    first = stepped(Precise(0.7), 1.0, 0.9, 0.5, 2.0)
    assert (float(first.mean), float(first.std)) == pytest.approx((0.05, 0.9))
    for noise in ("flow", "dance"):
        last = stepped(Precise(0.7, noise), 0.2, 0.0, 0.5, 2.0)  # type: ignore[arg-type]
        assert (float(last.mean), float(last.std)) == pytest.approx((0.5, 0.0))
    quiet, plain = (stepped(each, 0.6, 0.4, 0.5, 2.0) for each in (Precise(1e-6), ODE()))
    torch.testing.assert_close(quiet.mean, plain.mean)


def variance(kernel: Kernel, steps: int) -> float:
    """Return the variance that rollouts end with where data are standard normal and velocities exact, shift 3."""
    even = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    places = grid_of(3 * even / (1 + 2 * even))
    velocity = (2 * places.sigma - 1) / ((1 - places.sigma) ** 2 + places.sigma**2)
    step, found = kernel.step(torch.ones(steps, 1, dtype=torch.float64), velocity[:, None], places), 1.0
    for factor, std in zip(step.mean[:, 0].tolist(), step.std.tolist(), strict=True):
        found = found * factor**2 + std**2
    return found


def test_which_samplers_reach_the_law_they_sample() -> None:
    """With more steps the variance comes to 1, but not that of CPS, whose noise does not shrink with the step."""
    expected = {
        ODE(): (0.694, 0.982),
        FlowSDE(0.7): (0.801, 0.996),
        DanceSDE(0.3): (0.704, 0.983),
        Precise(0.7): (0.651, 0.976),
        CPS(0.8): (0.467, 0.631),
    }
    for kernel, values in expected.items():
        assert [variance(kernel, steps) for steps in (10, 200)] == pytest.approx(values, abs=6e-4)
        assert (variance(kernel, 2000) > 0.99) == (kernel != CPS(0.8))
