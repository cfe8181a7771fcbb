"""The one sampling loop and the one log-prob replay, for every model family.

Legend: B rows, T steps, ... latent dims, S trained steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.policies.base import Conditioning, Policy
from models.schedules import Steps
from models.solvers import Solver
from models.transitions import Gaussian, Grid, Kernel, expand


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """What one batch of sampling gives."""

    final: Tensor
    """(B, ...) float32 latents at sigma 0."""
    states: Tensor | None
    """(B, N, ...) stored latents in the storage dtype, or None when nothing is trained."""
    log_probs: Tensor
    """(B, S) float32 log-probs of the trained steps."""
    means: Tensor
    """(B, S, ...) float32 means of the trained steps."""


@torch.no_grad()
def sample(
    policy: Policy,
    conditioning: Conditioning,
    latents: Tensor,
    sigmas: Tensor,
    *,
    kernel: Kernel,
    plans: Sequence[Steps],
    solver: Solver,
    noise: Callable[[int], Tensor],
    storage_dtype: torch.dtype = torch.float32,
) -> Rollout:
    """Denoise a batch; steps outside a row's plan are ODE steps.

    Latents are rounded to the storage dtype before the log-prob is computed and before the next step uses them: what
    is stored is what was scored.

    Args:
        policy: gives velocities.
        conditioning: B rows.
        latents: (B, ...) float32 initial noise.
        sigmas: (T + 1,) float32 from 1 to 0.
        kernel: the stochastic step.
        solver: the deterministic step.
        plans: B plans with equally many trained steps.
        noise: step -> (B, ...) float32 standard normal noise; asked only for steps that some row needs.
        storage_dtype: dtype the stored latents are rounded to.

    Returns:
        Final latents, stored states and log-probs.
    """
    steps = len(sigmas) - 1
    history: dict[int, Tensor] = {}
    log_probs: dict[int, Tensor] = {}
    means: dict[int, Tensor] = {}
    for step in range(steps + 1):
        stored = _rows_where(latents, [step in plan.states for plan in plans])
        latents = torch.where(stored, latents.to(storage_dtype).float(), latents)
        if bool(stored.any()):
            history[step] = latents.to(storage_dtype)
        if step == steps:
            break
        grid = grid_at(sigmas, torch.full((len(latents),), step, device=latents.device))
        velocity = policy.velocity(latents, grid.sigma, conditioning)
        following = solver.advance(latents, velocity, grid)
        moving = _rows_where(latents, [step in plan.stochastic for plan in plans])
        if bool(moving.any()):
            distribution = kernel.step(latents, velocity, grid)
            drawn = distribution.sample(noise(step).to(latents.device)).to(storage_dtype).float()
            following = torch.where(moving, drawn, following)
            solver.forget()
            log_probs[step], means[step] = distribution.log_prob(following), distribution.mean
        latents = following
    return Rollout(
        final=latents,
        states=_gather([plan.states for plan in plans], history) if history else None,
        log_probs=_gather([plan.trained for plan in plans], log_probs),
        means=_gather([plan.trained for plan in plans], means),
    )


def _rows_where(like: Tensor, flags: Sequence[bool]) -> Tensor:
    return expand(torch.tensor(flags, device=like.device), like)


def _gather(wanted: Sequence[Sequence[int]], by_step: Mapping[int, Tensor]) -> Tensor:
    """Return row r's values at its own steps, stacked to (B, N, ...)."""
    if not wanted[0]:
        return torch.zeros(len(wanted), 0)
    return torch.stack([torch.stack([by_step[step][row] for step in steps]) for row, steps in enumerate(wanted)])


def replay(kernel: Kernel, latents: Tensor, velocity: Tensor, following: Tensor, grid: Grid) -> tuple[Gaussian, Tensor]:
    """Return the distribution and the (B,) log-prob of stored transitions under a velocity.

    Equal to the rollout's log-prob bit for bit when the velocity is.
    """
    distribution = kernel.step(latents, velocity, grid)
    return distribution, distribution.log_prob(following)


def grid_at(sigmas: Tensor, steps: Tensor) -> Grid:
    """Return the grid of rows at given steps, (B,), of one schedule (T + 1,)."""
    return Grid(sigmas[steps], sigmas[steps + 1], sigmas[torch.ones_like(steps)])


def ode_plan() -> Steps:
    """Return the plan without stochastic steps, for evaluation and forward-process algorithms."""
    return Steps(stochastic=(), trained=())
