"""Further published sampler steps, in the conventions of models/maths/transitions.py. Pure: tensors in, tensors out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from flowmill.models.maths.transitions import Gaussian, Grid, Noise, expand, predictions, sde_step


@dataclass(frozen=True, slots=True)
class DanceSDE:
    """DanceGRPO's reverse SDE (arXiv 2505.07818; public code ``train_grpo_flux.py:flux_step``). The Flow-SDE with the
    constant s = eta, so it has no singularity at sigma == 1."""

    stochastic: ClassVar[bool] = True
    eta: Noise = 0.3
    """The noise scale s, the same at every step."""

    def step(self, latents: Tensor, velocity: Tensor, grid: Grid) -> Gaussian:
        """Return the SDE's Gaussian."""
        return sde_step(latents, velocity, grid, torch.full_like(grid.sigma, self.eta))


@dataclass(frozen=True, slots=True)
class WanSDE:
    """Flow-GRPO's variant for Wan (``wan_pipeline_with_logprob.py:sde_step_with_logprob``). The Flow-SDE with s =
    sigma_second * sigma: it runs from the second value of the grid to 0 and has no noise level."""

    stochastic: ClassVar[bool] = True

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

    stochastic: ClassVar[bool] = True
    noise_level: Annotated[Noise, Field(le=2)] = 0.8
    """In (0, 2); 1 draws fresh noise for the next latents, and above it the sine falls again: 1.2 is 0.8 (Flow-GRPO's
    configs go up to 1.5)."""
    log_prob: Literal["gaussian", "squared"] = "gaussian"
    """The log-density, or the peers' form without its scale."""

    def step(self, latents: Tensor, velocity: Tensor, grid: Grid) -> Gaussian:
        """Return the step's Gaussian; its std is 0 where sigma' is."""
        std = grid.sigma_next * math.sin(math.pi * self.noise_level / 2)
        clean, noise = predictions(latents, velocity, grid.sigma)
        keep = torch.sqrt((grid.sigma_next**2 - std**2).clamp(min=0))
        mean = expand(1 - grid.sigma_next, latents) * clean + expand(keep, latents) * noise
        return Gaussian(mean, std.abs(), normalized=self.log_prob == "gaussian")


@dataclass(frozen=True, slots=True)
class FlowDDIM:
    """The DDIM step with eta in flow-matching form (public code: DiffusionNFT ``solver.py:ddim_step``). next = (1 -
    sigma') x0^ + sqrt(sigma'^2 - rho^2) eps^ + rho noise, rho = eta sigma' sqrt(1 - sigma'^2 (1 - sigma)^2 / (sigma^2
    (1 - sigma')^2))."""

    stochastic: ClassVar[bool] = True
    # Above 1 rho exceeds sigma' at small steps; the next noise level would not be the schedule's.
    eta: Annotated[Noise, Field(le=1)] = 0.7
    """Factor of the noise's std, in (0, 1]."""

    def step(self, latents: Tensor, velocity: Tensor, grid: Grid) -> Gaussian:
        """Return the step's Gaussian."""
        sigma, following = grid.sigma, grid.sigma_next
        inner = 1 - following**2 * (1 - sigma) ** 2 / (sigma**2 * (1 - following) ** 2)
        std = self.eta * following * torch.sqrt(inner.clamp(min=0))
        clean, noise = predictions(latents, velocity, sigma)
        keep = torch.sqrt((following**2 - std**2).clamp(min=0))
        return Gaussian(expand(1 - following, latents) * clean + expand(keep, latents) * noise, std)


@dataclass(frozen=True, slots=True)
class Precise:
    """The reverse SDE with the predicted x0 fixed, solved exactly (Precise, arXiv 2605.23522; no public code).

    next = (1 - sigma') x0^ + sigma' (rho eps^ + sqrt(1 - rho^2) noise), rho = exp(-1/2 int g(u)^2 / u^2 du) from sigma'
    to sigma: coefficients-preserving as CPS, but its noise shrinks with the step. With Flow-SDE's g it is
    (odds(sigma') / odds(sigma))^(noise_level^2 / 2), odds(s) = s / (1 - s): 0 at sigma 1, where that SDE explodes. With
    Dance-SDE's it is exp(-noise_level^2 / 2 (1 / sigma' - 1 / sigma)). The paper's own g is not public.
    """

    stochastic: ClassVar[bool] = True
    noise_level: Noise = 0.7
    """Noise level of Flow-SDE, or eta of Dance-SDE."""
    noise: Literal["flow", "dance"] = "flow"
    """The SDE whose noise scale g is used."""

    def rho_of(self, grid: Grid) -> Tensor:
        """Return rho, (B,): the share of the predicted noise that stays."""
        sigma, following = grid.sigma, grid.sigma_next
        if self.noise == "dance":
            return torch.exp(-(self.noise_level**2) / 2 * (1 / following - 1 / sigma))
        odds = following * (1 - sigma) / (sigma * (1 - following))
        return odds ** (self.noise_level**2 / 2)

    def step(self, latents: Tensor, velocity: Tensor, grid: Grid) -> Gaussian:
        """Return the step's Gaussian; its std is 0 where sigma' is."""
        rho, following = self.rho_of(grid), grid.sigma_next
        clean, noise = predictions(latents, velocity, grid.sigma)
        mean = expand(1 - following, latents) * clean + expand(following * rho, latents) * noise
        return Gaussian(mean, following * torch.sqrt((1 - rho**2).clamp(min=0)))
