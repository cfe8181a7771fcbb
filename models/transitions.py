"""Transition kernels of flow-matching samplers, and their log-probs. Pure: tensors in, tensors out.

Conventions, stated once:
    sigma runs from 1 (noise) to 0 (data);  x = (1 - sigma) x0 + sigma eps;  v = eps - x0;
    dt = sigma_next - sigma < 0;  log-probs are the MEAN over the latent dims, as in every public trainer, so a
    log-ratio is D times smaller than that of the density and clip ranges are 1e-3 .. 1e-6.
    sigma == 1: the Flow-SDE noise s = a sqrt(sigma / (1 - sigma)) is infinite there, so a sigma above 0.99 uses the
    second value of its grid in the denominator when that is smaller. Flow-GRPO does so at exactly 1, with which this
    agrees; a grid that starts at 0.999999 would explode under its rule and does not under this one.

Legend: B rows (each with its own sigma), ... latent dims, D their product. All math is float32 or float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

KERNELS = {
    "ode": "models.transitions:ODE",
    "flow_sde": "models.transitions:FlowSDE",
    "dance_sde": "models.transitions:DanceSDE",
    "cps": "models.transitions:CPS",
    "wan_sde": "models.transitions:WanSDE",
    "ddim": "models.transitions:FlowDDIM",
}


@dataclass(frozen=True, slots=True)
class Gaussian:
    """The distribution of the next latents: independent normals of one std per row."""

    mean: Tensor
    """(B, ...)"""
    std: Tensor
    """(B,), 0 for a deterministic step."""
    normalized: bool = True
    """False: log-probs are -mean (x' - mu)^2, without scale and constants (the peers' CPS)."""

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
    """Where on the schedule each row is."""

    sigma: Tensor
    """(B,) noise level now."""
    sigma_next: Tensor
    """(B,) noise level after the step."""
    sigma_second: Tensor
    """(B,) second value of the row's schedule, for the sigma == 1 rule."""

    def __getitem__(self, rows: Tensor | slice) -> Grid:
        """Return the grid of some rows."""
        return Grid(self.sigma[rows], self.sigma_next[rows], self.sigma_second[rows])


class Kernel(Protocol):
    """One step of a sampler: how latents and velocity lead to the next latents."""

    @property
    def stochastic(self) -> bool:
        """True when the step has noise, hence a log-prob."""
        ...

    def step(self, latents: Tensor, velocity: Tensor, grid: Grid) -> Gaussian:
        """Return the distribution of the next latents for (B, ...) latents and velocity."""
        ...


@dataclass(frozen=True, slots=True)
class ODE:
    """The Euler step of the probability-flow ODE, as in diffusers' FlowMatchEulerDiscreteScheduler.step."""

    @property
    def stochastic(self) -> bool:
        """False."""
        return False

    def step(self, latents: Tensor, velocity: Tensor, grid: Grid) -> Gaussian:
        """Return x + dt v with std 0."""
        dt = expand(grid.sigma_next - grid.sigma, latents)
        return Gaussian(latents + dt * velocity, torch.zeros_like(grid.sigma))


@dataclass(frozen=True, slots=True)
class FlowSDE:
    """Flow-GRPO's reverse SDE (arXiv 2505.05470, eq. 9; public code ``sde_step_with_logprob``, sde_type 'sde').

    mean = x + [v + s^2 / (2 sigma) (x + (1 - sigma) v)] dt,  std = s sqrt(-dt),
    s = noise_level sqrt(sigma / (1 - sigma)); noise_level 0 would be the ODE.
    """

    noise_level: float = 0.7

    def __post_init__(self) -> None:
        """Check the noise level.

        Raises:
            ValueError: it is not positive; use the sampler 'ode' for a deterministic step.
        """
        _positive("noise_level", self.noise_level)

    @property
    def stochastic(self) -> bool:
        """True."""
        return True

    def scale(self, grid: Grid) -> Tensor:
        """Return s, (B,)."""
        safe = torch.where(grid.sigma > 0.99, torch.minimum(grid.sigma, grid.sigma_second), grid.sigma)
        return self.noise_level * torch.sqrt(grid.sigma / (1 - safe))

    def step(self, latents: Tensor, velocity: Tensor, grid: Grid) -> Gaussian:
        """Return the SDE's Gaussian; the mean uses the true sigma, only s the safe one."""
        return sde_step(latents, velocity, grid, self.scale(grid))


@dataclass(frozen=True, slots=True)
class DanceSDE:
    """DanceGRPO's reverse SDE (arXiv 2505.07818; public code ``train_grpo_flux.py:flux_step``).

    The Flow-SDE with the constant s = eta, so it has no singularity at sigma == 1.
    """

    eta: float = 0.3

    def __post_init__(self) -> None:
        """Check eta.

        Raises:
            ValueError: it is not positive.
        """
        _positive("eta", self.eta)

    @property
    def stochastic(self) -> bool:
        """True."""
        return True

    def step(self, latents: Tensor, velocity: Tensor, grid: Grid) -> Gaussian:
        """Return the SDE's Gaussian."""
        return sde_step(latents, velocity, grid, torch.full_like(grid.sigma, self.eta))


@dataclass(frozen=True, slots=True)
class WanSDE:
    """Flow-GRPO's variant for Wan (``wan_pipeline_with_logprob.py:sde_step_with_logprob``).

    The Flow-SDE with s = sigma_second * sigma: it runs from the second value of the grid to 0 and has no noise level.
    """

    @property
    def stochastic(self) -> bool:
        """True."""
        return True

    def step(self, latents: Tensor, velocity: Tensor, grid: Grid) -> Gaussian:
        """Return the SDE's Gaussian."""
        return sde_step(latents, velocity, grid, grid.sigma_second * grid.sigma)


@dataclass(frozen=True, slots=True)
class CPS:
    """Coefficients-preserving sampling, FlowCPS (public code: Flow-GRPO's sde_type 'cps').

    mean = (1 - sigma') x0^ + sqrt(sigma'^2 - q^2) eps^,  std = q = sigma' sin(pi noise_level / 2): the noise level of
    the next latents is exactly sigma', which an Euler-Maruyama step overshoots.

    ``log_prob='squared'`` is the peers' -mean (x' - mu)^2, which leaves 1 / (2 q^2) out, so that their ratios shrink
    with q^2; 'gaussian' is the density.
    """

    noise_level: float = 0.8
    log_prob: Literal["gaussian", "squared"] = "gaussian"

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            ValueError: one cannot work.
        """
        _positive("noise_level", self.noise_level)
        if self.log_prob not in ("gaussian", "squared"):
            raise ValueError(f"log_prob is {self.log_prob!r}; it must be 'gaussian' or 'squared'.")

    @property
    def stochastic(self) -> bool:
        """True."""
        return True

    def step(self, latents: Tensor, velocity: Tensor, grid: Grid) -> Gaussian:
        """Return the step's Gaussian; its std is 0 where sigma' is."""
        std = grid.sigma_next * math.sin(math.pi * self.noise_level / 2)
        clean, noise = predictions(latents, velocity, grid.sigma)
        keep = torch.sqrt((grid.sigma_next**2 - std**2).clamp(min=0))
        mean = expand(1 - grid.sigma_next, latents) * clean + expand(keep, latents) * noise
        return Gaussian(mean, std.abs(), normalized=self.log_prob == "gaussian")


@dataclass(frozen=True, slots=True)
class FlowDDIM:
    """The DDIM step with eta in flow-matching form (public code: DiffusionNFT ``solver.py:ddim_step``).

    next = (1 - sigma') x0^ + sqrt(sigma'^2 - rho^2) eps^ + rho noise,
    rho = eta sigma' sqrt(1 - sigma'^2 (1 - sigma)^2 / (sigma^2 (1 - sigma')^2)).
    """

    eta: float = 0.7

    def __post_init__(self) -> None:
        """Check eta.

        Raises:
            ValueError: it is not positive.
        """
        _positive("eta", self.eta)

    @property
    def stochastic(self) -> bool:
        """True."""
        return True

    def step(self, latents: Tensor, velocity: Tensor, grid: Grid) -> Gaussian:
        """Return the step's Gaussian."""
        sigma, following = grid.sigma, grid.sigma_next
        inner = 1 - following**2 * (1 - sigma) ** 2 / (sigma**2 * (1 - following) ** 2)
        std = self.eta * following * torch.sqrt(inner.clamp(min=0))
        clean, noise = predictions(latents, velocity, sigma)
        keep = torch.sqrt((following**2 - std**2).clamp(min=0))
        return Gaussian(expand(1 - following, latents) * clean + expand(keep, latents) * noise, std)


def ddim_epsilon_step(latents: Tensor, epsilon: Tensor, alpha: Tensor, alpha_next: Tensor, eta: float) -> Gaussian:
    """Return the DDIM step of an epsilon-prediction model (arXiv 2010.02502, eq. 12; DDPO ``ddim_with_logprob.py``).

    Args:
        latents: (B, ...) at cumulative alpha ``alpha``.
        epsilon: (B, ...) predicted noise.
        alpha: (B,) cumulative product of alphas now.
        alpha_next: (B,) the same after the step, larger.
        eta: 1 is ancestral sampling (what DDPO trains with), 0 the deterministic DDIM.
    """
    std = eta * torch.sqrt((1 - alpha_next) / (1 - alpha) * (1 - alpha / alpha_next))
    clean = (latents - expand(torch.sqrt(1 - alpha), latents) * epsilon) / expand(torch.sqrt(alpha), latents)
    keep = torch.sqrt(1 - alpha_next - std**2)
    return Gaussian(expand(torch.sqrt(alpha_next), latents) * clean + expand(keep, latents) * epsilon, std)


def step_stds(kernel: Kernel, sigmas: Tensor) -> Tensor:
    """Return the (T,) noise std of every step of a schedule (T + 1,) under a kernel."""
    grid = Grid(sigmas[:-1], sigmas[1:], sigmas[1].expand(len(sigmas) - 1))
    empty = torch.zeros(len(sigmas) - 1, 1, dtype=sigmas.dtype, device=sigmas.device)
    return kernel.step(empty, empty, grid).std


def sde_step(latents: Tensor, velocity: Tensor, grid: Grid, s: Tensor) -> Gaussian:
    """Return the Euler-Maruyama step of the reverse SDE with noise scale s (B,): the form all three SDEs share."""
    dt = grid.sigma_next - grid.sigma
    drift = expand(s**2 / (2 * grid.sigma) * dt, latents)
    keep, sigma = expand(dt, latents), expand(grid.sigma, latents)
    mean = latents * (1 + drift) + velocity * (keep + drift * (1 - sigma))
    return Gaussian(mean, s * torch.sqrt(-dt))


def predictions(latents: Tensor, velocity: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
    """Return the clean latents and the noise a velocity implies: x0^ = x - sigma v, eps^ = x + (1 - sigma) v."""
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


def _positive(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{name} is {value}; it must be above 0. Use sampler 'ode' for no noise.")
