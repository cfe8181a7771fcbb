"""The one sampling loop and the one log-prob replay, for every model family.
Legend: B rows, T steps, ... latent dims, S trained steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flowmill.models.devices import moved
from flowmill.models.maths.conditioning import Conditioning, GivesVelocity
from flowmill.models.maths.schedules import Steps
from flowmill.models.maths.solvers import Solver
from flowmill.models.maths.transitions import Gaussian, Grid, Kernel, gaussian_kl


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """Result of one batch of sampling."""

    final: Tensor
    """(B, ...) float32 latents at sigma 0."""
    states: Tensor | None
    """(B, N, ...) stored latents in the storage dtype, or None when nothing is stored; rows that store fewer than the
    others end in zeros."""
    log_probs: Tensor
    """(B, S) float32 log-probs of the trained steps."""
    means: Tensor
    """(B, S, ...) float32 means of the trained steps."""
    reference_kl: Tensor
    """(B, S) float32 KL of the trained steps to the reference's, or (B, 0) without a reference."""
    unconditional: Tensor
    """(B, S, ...) float32 predictions for the negative prompt of the trained steps, or (B, 0) where none are stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """How steps are taken."""

    kernel: Kernel
    solver: Solver
    storage_dtype: torch.dtype = field(default_factory=lambda: torch.float32)
    """Dtype the stored latents are rounded to."""
    reference: Callable[[Tensor, Tensor, Conditioning], Tensor] | None = None
    """Returns the base model's velocities, for a KL to it; None: no KL."""
    unconditional: bool = False
    """Keep the predictions for the negative prompt."""


def sample(
    policy: GivesVelocity,
    conditioning: Conditioning,
    latents: Tensor,
    sigmas: Tensor,
    *,
    sampler: Sampler,
    plans: Sequence[Steps],
    noise: Callable[[int], Tensor],
) -> Rollout:
    """Denoise a batch; steps outside a row's plan are ODE steps.

    Latents are rounded to the storage dtype before the log-prob is computed and before the next step uses them: stored
    and scored values are equal.

    Args:
        conditioning: B rows.
        latents: (B, ...) float32 initial noise.
        sigmas: (T + 1,) float32 from 1 to 0.
        plans: B plans with equally many trained steps.
        noise: step -> (B, ...) float32 standard normal noise; called only for steps that are stochastic in some row.
    """
    with torch.no_grad():
        steps, storage_dtype, noted = len(sigmas) - 1, sampler.storage_dtype, _Noted()
        stores = _flags([plan.states for plan in plans], steps, latents)
        moves = _flags([plan.stochastic for plan in plans], steps, latents)
        for step in range(steps + 1):
            if any(step in plan.states for plan in plans):
                latents = torch.where(stores[step], latents.to(storage_dtype).float(), latents)
                noted.states[step] = latents.to(storage_dtype)
            if step == steps:
                break
            grid = _grid_of(sigmas, step, latents)
            moving = any(step in plan.stochastic for plan in plans)
            velocity = noted.velocity(policy, step, latents, grid, conditioning, keep=sampler.unconditional and moving)
            following = sampler.solver.advance(latents, velocity, grid)
            if moving:
                distribution = sampler.kernel.step(latents, velocity, grid)
                drawn = distribution.sample(moved(noise(step), latents.device)).to(storage_dtype).float()
                following = torch.where(moves[step], drawn, following)
                sampler.solver.forget()
                noted.transition(sampler, step, distribution, latents, following, grid, conditioning)
            latents = following
        return noted.rollout(latents, plans)


def rescore(
    policy: GivesVelocity,
    conditioning: Conditioning,
    chains: Tensor,
    states: Sequence[Sequence[int]],
    sigmas: Tensor,
    *,
    sampler: Sampler,
    plans: Sequence[Steps],
) -> Rollout:
    """Return the result of ``sample`` for chains that were drawn before, here or elsewhere, from their trained steps.

    Bitwise equal to the result of ``sample`` if it drew the chains in a batch of the same size.

    Args:
        conditioning: B rows.
        chains: (B, N, ...) float32 latents.
        states: the steps of each row's latents, [N]; those that its plan stores, and T.
        sigmas: (T + 1,) float32 from 1 to 0.
        sampler: how steps were taken.
        plans: B plans with equally many trained steps.
    """
    with torch.no_grad():
        noted, places = _Noted(), [{step: place for place, step in enumerate(row)} for row in states]

        def at(step: int) -> Tensor:
            # Rows without this step are computed, and not used.
            return torch.stack([chain[row.get(step, 0)] for chain, row in zip(chains, places, strict=True)])

        for step in sorted({step for plan in plans for step in plan.trained}):
            latents, following = at(step), at(step + 1)
            grid = _grid_of(sigmas, step, latents)
            velocity = noted.velocity(policy, step, latents, grid, conditioning, keep=sampler.unconditional)
            distribution = sampler.kernel.step(latents, velocity, grid)
            noted.transition(sampler, step, distribution, latents, following, grid, conditioning)
        noted.states.update({step: at(step) for step in sorted({step for plan in plans for step in plan.states})})
        return noted.rollout(at(len(sigmas) - 1), plans)


def _grid_of(sigmas: Tensor, step: int, latents: Tensor) -> Grid:
    return grid_at(sigmas, torch.full((len(latents),), step, device=latents.device))


@dataclass(frozen=True, slots=True)
class _Noted:
    """Values stored during the sampling of a batch, (B, ...) by step."""

    states: dict[int, Tensor] = field(default_factory=dict)
    log_probs: dict[int, Tensor] = field(default_factory=dict)
    means: dict[int, Tensor] = field(default_factory=dict)
    reference_kl: dict[int, Tensor] = field(default_factory=dict)
    unconditional: dict[int, Tensor] = field(default_factory=dict)

    def velocity(
        self, policy: GivesVelocity, step: int, latents: Tensor, grid: Grid, conditioning: Conditioning, *, keep: bool
    ) -> Tensor:
        """Return the velocities of a step; ``keep``: note the predictions for the negative prompt."""
        if not keep:
            return policy.velocity(latents, grid.sigma, conditioning)
        velocity, negative = policy.guided_velocity(latents, grid.sigma, conditioning)
        assert negative is not None, "the model is called without guidance"
        self.unconditional[step] = negative
        return velocity

    def transition(
        self,
        sampler: Sampler,
        step: int,
        distribution: Gaussian,
        latents: Tensor,
        following: Tensor,
        grid: Grid,
        conditioning: Conditioning,
    ) -> None:
        """Note a stochastic step."""
        self.log_probs[step], self.means[step] = distribution.log_prob(following), distribution.mean
        if sampler.reference is not None:
            base = sampler.kernel.step(latents, sampler.reference(latents, grid.sigma, conditioning), grid)
            self.reference_kl[step] = gaussian_kl(distribution, base)

    def rollout(self, final: Tensor, plans: Sequence[Steps]) -> Rollout:
        trained = [plan.trained for plan in plans]
        none: list[tuple[int, ...]] = [()] * len(plans)
        return Rollout(
            final=final,
            states=_gather([plan.states for plan in plans], self.states) if self.states else None,
            log_probs=_gather(trained, self.log_probs),
            means=_gather(trained, self.means),
            reference_kl=_gather(trained if self.reference_kl else none, self.reference_kl),
            unconditional=_gather(trained if self.unconditional else none, self.unconditional),
        )


def _flags(by_row: Sequence[Sequence[int]], steps: int, like: Tensor) -> Tensor:
    """Return a (T + 1, B, 1, ...) bool mask of the steps of each row, on the device of ``like`` (B, ...)."""
    flags = torch.tensor([[step in row for row in by_row] for step in range(steps + 1)])
    return moved(flags.view(steps + 1, len(by_row), *[1] * (like.ndim - 1)), like.device)


def _gather(by_row: Sequence[Sequence[int]], by_step: Mapping[int, Tensor]) -> Tensor:
    """Return row r's values at its own steps, stacked to (B, N, ...); shorter rows end in zeros."""
    if not by_row[0]:
        return torch.zeros(len(by_row), 0)
    rows = [torch.stack([by_step[step][row] for step in steps]) for row, steps in enumerate(by_row)]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def replay(kernel: Kernel, latents: Tensor, velocity: Tensor, following: Tensor, grid: Grid) -> tuple[Gaussian, Tensor]:
    """Return the distribution and the (B,) log-prob of stored transitions under a velocity. It is bitwise equal to the
    rollout's log-prob if the velocities are."""
    distribution = kernel.step(latents, velocity, grid)
    return distribution, distribution.log_prob(following)


def grid_at(sigmas: Tensor, steps: Tensor) -> Grid:
    """Return the grid of rows at steps, (B,), of one schedule (T + 1,)."""
    return Grid(sigmas[steps], sigmas[steps + 1], sigmas[torch.ones_like(steps)])


def ode_plan() -> Steps:
    """Return the plan without stochastic steps, for evaluation and forward-process algorithms."""
    return Steps(stochastic=(), trained=())
