"""Per-step branching: an ODE trunk, K stochastic branches at every chosen step, each finished by the ODE.

TempFlow-GRPO (arXiv 2508.04324) samples this way, so that the reward of a branch is that of the one step it took. All
branches from earlier steps have the same noise level as the trunk, so one forward per step advances them all.

Legend: B trunks, K branches per chosen step, M branches in all, T steps, R rows per forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowmill.models.devices import moved
from flowmill.models.maths.conditioning import Conditioning, GivesVelocity
from flowmill.models.maths.sampling import Sampler, grid_at
from flowmill.models.maths.schedules import Steps
from flowmill.models.maths.transitions import ODE


@dataclass(frozen=True, slots=True, kw_only=True)
class Branches:
    """Result of a batch of trunks: one row per branch, ordered by (step, number, trunk)."""

    trunk: Tensor
    """(M,) int64 trunk each branch left."""
    step: Tensor
    """(M,) int64 step at which it left."""
    number: Tensor
    """(M,) int64 number of the branch among the K of its trunk and step."""
    before: Tensor
    """(M, ...) state of the trunk at the step, in the storage dtype."""
    after: Tensor
    """(M, ...) drawn next state, in the storage dtype."""
    log_probs: Tensor
    """(M,) float32 log-prob of the drawn state."""
    means: Tensor
    """(M, ...) float32 mean it was drawn around."""
    final: Tensor
    """(M, ...) float32 latents at sigma 0."""
    unconditional: Tensor | None = None
    """(M, ...) float32 predictions for the negative prompt before the draw, where they are stored."""


def branch(
    policy: GivesVelocity,
    conditioning: Conditioning,
    latents: Tensor,
    sigmas: Tensor,
    *,
    sampler: Sampler,
    plan: Steps,
    noise: Callable[[int, int], Tensor],
    max_rows: int,
) -> Branches:
    """Sample trunks and branches together.

    Args:
        conditioning: B rows.
        latents: (B, ...) float32 initial noise.
        sigmas: (T + 1,) float32.
        sampler: the stochastic step, the dtype stored states are rounded to before the log-prob is computed, and
            whether predictions for the negative prompt are stored; all other steps are Euler's.
        plan: trained steps at which every trunk branches, and K branches.
        noise: (step, branch number) -> (B, ...) float32 standard normal noise.
        max_rows: R; every forward has exactly this many rows, the last one padded, so that the same kernels run for any
            number of branches.
    """
    with torch.no_grad():
        trunks, trunk_ids = latents, torch.arange(len(latents), device=latents.device)
        owners, live = trunk_ids[:0], latents[:0]
        kernel, storage_dtype = sampler.kernel, sampler.storage_dtype
        names = [*_BORN, *["unconditional"] * sampler.unconditional]
        born: dict[str, list[Tensor]] = {name: [] for name in names}
        for step in range(len(sigmas) - 1):
            if step in plan.trained:
                # Equal to the stored state, so that a replay gets the same input.
                trunks = trunks.to(storage_dtype).float()
            rows, index = torch.cat([trunks, live]), torch.cat([trunk_ids, owners])
            grid = grid_at(sigmas, torch.full((len(rows),), step, device=latents.device))
            forward = policy.guided_velocity if sampler.unconditional else policy.velocity
            velocity, *negative = _forwards(forward, conditioning, rows, (grid.sigma, index), max_rows)
            following = ODE().step(rows, velocity, grid).mean
            size = len(trunks)
            live = following[size:]
            if step in plan.trained:
                distribution = kernel.step(trunks, velocity[:size], grid[slice(0, size)])
                for number in range(plan.branches):
                    drawn = distribution.sample(moved(noise(step, number), latents.device)).to(storage_dtype)
                    values = (
                        *(trunk_ids, torch.full_like(trunk_ids, step), torch.full_like(trunk_ids, number)),
                        *(trunks.to(storage_dtype), drawn, distribution.log_prob(drawn.float()), distribution.mean),
                        *(each[:size] for each in negative),
                    )
                    for name, value in zip(names, values, strict=True):
                        born[name].append(value)
                    live, owners = torch.cat([live, drawn.float()]), torch.cat([owners, trunk_ids])
            trunks = following[:size]
        return Branches(final=live, **{name: torch.cat(values) for name, values in born.items()})


_BORN = ("trunk", "step", "number", "before", "after", "log_probs", "means")


def _forwards(
    forward: Callable[[Tensor, Tensor, Conditioning], Any],
    conditioning: Conditioning,
    latents: Tensor,
    at: tuple[Tensor, Tensor],
    max_rows: int,
) -> list[Tensor]:
    """Return the results of forwards of rows at (sigma, trunk index), each of exactly ``max_rows`` rows."""
    sigma, index = at
    missing = -len(latents) % max_rows
    pad = torch.arange(len(latents) + missing, device=latents.device).clamp(max=len(latents) - 1)
    parts = [forward(latents[rows], sigma[rows], conditioning.rows(index[rows])) for rows in pad.split(max_rows)]
    columns = zip(*parts, strict=True) if isinstance(parts[0], tuple) else [parts]
    return [torch.cat(tuple(column))[: len(latents)] for column in columns]
