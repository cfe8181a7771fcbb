"""A policy and a step that return stored numbers: what stands around an algorithm's own ``loss``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from flowmill.models.maths.transitions import FlowSDE, Gaussian, Grid, Kernel


class Given:
    """A trainable that returns stored tensors: of the policy, or while held those of the behavior policy."""

    def __init__(self, velocity: Tensor, reference: Tensor) -> None:
        self.policy, self.current, self.reference = self, velocity, reference

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Any) -> Tensor:
        return self.current

    def reference_velocity(self, latents: Tensor, sigma: Tensor, conditioning: Any) -> Tensor:
        return self.reference

    teacher_velocity = reference_velocity

    @contextmanager
    def holding(self, values: list[Tensor]) -> Iterator[None]:
        own, self.current = self.current, values[0]
        try:
            yield
        finally:
            self.current = own


@dataclass(frozen=True, slots=True)
class Scored(Gaussian):
    """A step whose log-prob is given."""

    known: Tensor | None = None

    def log_prob(self, value: Tensor) -> Tensor:
        assert self.known is not None
        return self.known


@dataclass(frozen=True, slots=True)
class GivenStep:
    """The Flow-SDE's step, but with velocities for means, which the vectors hold, and given log-probs."""

    noise_level: float
    log_prob: Tensor
    stochastic = True

    def step(self, latents: Tensor, velocity: Tensor, grid: Grid) -> Gaussian:
        step = FlowSDE(self.noise_level).step(latents, velocity, grid)
        own = {each.name: getattr(step, each.name) for each in fields(step)}
        return Scored(**{**own, "mean": velocity}, known=self.log_prob)


@dataclass(frozen=True, slots=True)
class GivenLogProb:
    """A sampler's step whose log-prob is given."""

    kernel: Kernel
    log_prob: Tensor
    stochastic = True

    def step(self, latents: Tensor, velocity: Tensor, grid: Grid) -> Gaussian:
        step = self.kernel.step(latents, velocity, grid)
        return Scored(**{each.name: getattr(step, each.name) for each in fields(step)}, known=self.log_prob)
