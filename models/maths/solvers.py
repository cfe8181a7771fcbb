"""Deterministic solvers for steps without noise. A solver carries its memory from step to step.
Legend: B rows, ... latent dims. Conventions as in ``flowmill.models.maths.transitions``."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from flowmill.models.maths.transitions import ODE, Grid, expand, predictions


class Solver(Protocol):
    """Deterministic steps of one trajectory."""

    def advance(self, latents: Tensor, velocity: Tensor, grid: Grid) -> Tensor:
        """Return the (B, ...) latents after the step; steps come in order."""

    def forget(self) -> None:
        """Clear the memory: noise was added since the last step."""


class Euler:
    """The Euler step of the probability-flow ODE; it has no memory."""

    def advance(self, latents: Tensor, velocity: Tensor, grid: Grid) -> Tensor:
        """Return x + dt v."""
        return ODE().step(latents, velocity, grid).mean

    def forget(self) -> None:
        """Do nothing."""


class DPMSolver2M:
    """DPM-Solver++(2M) on flow sigmas (arXiv 2211.01095, algorithm 2; DiffusionNFT ``solver.py``, 'dpm2').

    x' = (sigma' / sigma) x - (1 - sigma') (exp(-h) - 1) D, with lambda = log((1 - sigma) / sigma), h the difference of
    lambda over the step, D = x0^ in the first and the last step and x0^ + (x0^ - x0^_before) / (2 r) between, where r
    is the ratio of the previous h to this one.
    """

    def __init__(self) -> None:
        self._before: tuple[Tensor, Tensor] | None = None

    def advance(self, latents: Tensor, velocity: Tensor, grid: Grid) -> Tensor:
        """Return the latents after the step."""
        clean, _ = predictions(latents, velocity, grid.sigma)
        here, there = _log_snr(grid.sigma), _log_snr(grid.sigma_next)
        estimate = self._estimate(clean, here, there, grid)
        self._before = (clean, here)
        shrink = -torch.expm1(-(there - here))
        following = expand(grid.sigma_next / grid.sigma, latents) * latents
        return following + expand((1 - grid.sigma_next) * shrink, latents) * estimate

    def forget(self) -> None:
        """Drop the previous prediction."""
        self._before = None

    def _estimate(self, clean: Tensor, here: Tensor, there: Tensor, grid: Grid) -> Tensor:
        if self._before is None or bool((grid.sigma_next == 0).any()):
            return clean
        before, earlier = self._before
        ratio = (here - earlier) / (there - here)
        # The first step starts at lambda = -inf: its ratio is infinite and the correction zero.
        return clean + expand(0.5 / ratio, clean) * (clean - before)


def _log_snr(sigma: Tensor) -> Tensor:
    return torch.log1p(-sigma) - torch.log(sigma)
