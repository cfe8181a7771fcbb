"""Transition kernels of flow-matching samplers, and their log-probs. Pure: tensors in, tensors out.

Conventions:
    sigma runs from 1 (noise) to 0 (data);  x = (1 - sigma) x0 + sigma eps;  v = eps - x0;
    dt = sigma_next - sigma < 0;  log-probs are the MEAN over the latent dims, as in every public trainer, so a
    log-ratio is D times smaller than that of the density and clip ranges are 1e-3 .. 1e-6.
    sigma == 1: the Flow-SDE noise s = a sqrt(sigma / (1 - sigma)) is infinite there, so a sigma above 0.99 uses the
    second value of its grid in the denominator when that is smaller. Flow-GRPO does so at exactly 1, where both rules
    agree; a grid that starts at 0.999999 would explode under its rule and does not under this one.

Legend: B rows (each with its own sigma), ... latent dims, D their product. All math is float32 or float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Protocol, TypeAlias

import torch
from pydantic import PositiveFloat
from torch import Tensor

#: Noise option of a kernel.
Noise: TypeAlias = Annotated[PositiveFloat, "Use sampler 'ode' for no noise."]


@dataclass(frozen=True, slots=True)
class Gaussian:
    """The distribution of the next latents: independent normals of one std per row."""

    mean: Tensor
    """(B, ...)"""
    std: Tensor
    """(B,), 0 for a deterministic step."""
    normalized: bool = True
    """False: log-probs are -mean (x' - mu)^2, without scale and constants (the peers' CPS)."""
    rate: Tensor | None = None
    """(B,) s of an SDE's step, whose std is s sqrt(|dt|); None: the step is not a discretized SDE."""

    def sample(self, noise: Tensor) -> Tensor:
        """Return mean + std * noise, (B, ...)."""
        return self.mean + expand(self.std, self.mean) * noise

    def log_prob(self, value: Tensor) -> Tensor:
        """Return (B,) log-densities of ``value`` (B, ...), averaged over dims; NaN where std is 0."""
        if not self.normalized:
            return -((value - self.mean) ** 2).flatten(1).mean(1)
        std = expand(self.std, self.mean)
        terms = -((value - self.mean) ** 2) / (2 * std**2) - torch.log(std) - 0.5 * math.log(2 * math.pi)
        return terms.flatten(1).mean(1)


@dataclass(frozen=True, slots=True)
class Grid:
    """Position of each row on the schedule."""

    sigma: Tensor
    """(B,) noise level now."""
    sigma_next: Tensor
    """(B,) noise level after the step."""
    sigma_second: Tensor
    """(B,) second value of the row's schedule, for the sigma == 1 rule."""

    def __getitem__(self, rows: Tensor | slice) -> Grid:
        return Grid(self.sigma[rows], self.sigma_next[rows], self.sigma_second[rows])


class Kernel(Protocol):
    """One step of a sampler, from latents and velocity to the next latents."""

    @property
    def stochastic(self) -> bool:
        """True when the step has noise, hence a log-prob."""

    def step(self, latents: Tensor, velocity: Tensor, grid: Grid) -> Gaussian:
        """Return the distribution of the next latents for (B, ...) latents and velocity."""


@dataclass(frozen=True, slots=True)
class ODE:
    """The Euler step of the probability-flow ODE, as in diffusers' FlowMatchEulerDiscreteScheduler.step."""

    stochastic: ClassVar[bool] = False

    def step(self, latents: Tensor, velocity: Tensor, grid: Grid) -> Gaussian:
        """Return x + dt v with std 0."""
        dt = expand(grid.sigma_next - grid.sigma, latents)
        return Gaussian(latents + dt * velocity, torch.zeros_like(grid.sigma))


@dataclass(frozen=True, slots=True)
class FlowSDE:
    """Flow-GRPO's reverse SDE (arXiv 2505.05470, eq. 9; public code ``sde_step_with_logprob``, sde_type 'sde'). mean =
    x + [v + s^2 / (2 sigma) (x + (1 - sigma) v)] dt,  std = s sqrt(-dt), s = noise_level sqrt(sigma / (1 - sigma));
    noise_level 0 would be the ODE."""

    stochastic: ClassVar[bool] = True
    noise_level: Noise = 0.7
    """Factor of the noise's std."""

    def scale(self, grid: Grid) -> Tensor:
        """Return s, (B,)."""
        safe = torch.where(grid.sigma > 0.99, torch.minimum(grid.sigma, grid.sigma_second), grid.sigma)
        return self.noise_level * torch.sqrt(grid.sigma / (1 - safe))

    def step(self, latents: Tensor, velocity: Tensor, grid: Grid) -> Gaussian:
        """Return the SDE's Gaussian; the mean uses the true sigma, only s the safe one."""
        return sde_step(latents, velocity, grid, self.scale(grid))


def step_stds(kernel: Kernel, sigmas: Tensor) -> Tensor:
    """Return the (T,) noise std of every step of a schedule (T + 1,) under a kernel."""
    empty = torch.zeros(len(sigmas) - 1, 1, dtype=sigmas.dtype, device=sigmas.device)
    return kernel.step(empty, empty, grid_of(sigmas)).std


def grid_of(sigmas: Tensor) -> Grid:
    """Return every step of a schedule (T + 1,), as T rows."""
    return Grid(sigmas[:-1], sigmas[1:], sigmas[1].expand(len(sigmas) - 1))


def rectifiers(kernel: Kernel, grid: Grid) -> Tensor:
    """Return (B,) std / |d mean / d v| of steps: factors that equalize the scale of a log-prob's gradient in v. The
    gradient of log N(mean, std) is noise / std times d mean / d v, a number per step, as the means of all kernels are
    linear in v."""
    still = torch.zeros(len(grid.sigma), 1, dtype=grid.sigma.dtype, device=grid.sigma.device)
    step = kernel.step(still, still, grid)
    moved = kernel.step(still, torch.ones_like(still), grid)
    return step.std / (moved.mean - step.mean)[:, 0].abs()


def sde_step(latents: Tensor, velocity: Tensor, grid: Grid, s: Tensor) -> Gaussian:
    """Return the Euler-Maruyama step of the reverse SDE with noise scale s (B,), shared by all three SDEs."""
    dt = grid.sigma_next - grid.sigma
    drift = expand(s**2 / (2 * grid.sigma) * dt, latents)
    keep, sigma = expand(dt, latents), expand(grid.sigma, latents)
    mean = latents * (1 + drift) + velocity * (keep + drift * (1 - sigma))
    return Gaussian(mean, s * torch.sqrt(-dt), rate=s)


def predictions(latents: Tensor, velocity: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
    """Return the clean latents and noise implied by a velocity: x0^ = x - sigma v, eps^ = x + (1 - sigma) v."""
    level = expand(sigma, latents)
    return latents - level * velocity, latents + (1 - level) * velocity


def expand(row_values: Tensor, like: Tensor) -> Tensor:
    """Return (B,) values shaped (B, 1, ...) to broadcast over ``like``."""
    return row_values.reshape(-1, *([1] * (like.ndim - 1)))


def log_ratio(new: Gaussian, old_mean: Tensor, value: Tensor) -> Tensor:
    """Return (B,) log p_new(value) - log p_old(value), mean over dims, from the two means.

    mean_d (mu - mu_old)(2 x' - mu - mu_old) / (2 std^2): no two large log-probs are subtracted, so in float32 it is an
    order of magnitude closer to the truth than their difference when summed over many dims.

    Args:
        new: step of the policy; the behavior step has the same std.
        old_mean: (B, ...) mean of the behavior policy's step.
        value: (B, ...) the next latents that were drawn.
    """
    products = (new.mean - old_mean) * (2 * value - new.mean - old_mean)
    return products.flatten(1).mean(1) / (2 * new.std**2)


def gaussian_kl(new: Gaussian, old: Gaussian) -> Tensor:
    """Return (B,) KL between two steps from the same state with the same std: mean_d (mu - mu')^2 / (2 std^2)."""
    return ((new.mean - old.mean) ** 2).flatten(1).mean(1) / (2 * new.std**2)
