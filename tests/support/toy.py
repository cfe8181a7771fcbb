"""A policy with a closed form and a handful of parameters, and batches of its samples; all float64 unless told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from flowmill.models.maths.conditioning import Conditioning
from flowmill.models.maths.transitions import FlowSDE, Grid, Kernel
from flowmill.tasks.algorithms.diffusion import (
    DiffusionModels,
    ForwardBatch,
    Question,
    StateBatch,
    Subjects,
    TransitionBatch,
)

SHAPE = (2, 3)
#: v = a x + b sigma + c with c along the last dim.
START = (0.4, -0.3, 0.2, -0.1, 0.5)
REFERENCE = (0.3, -0.2, 0.1, 0.1, 0.4)
BEHAVIOR = (0.42, -0.31, 0.18, -0.13, 0.52)


def vector(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


class Toy:
    """A trainable and its policy in one."""

    def __init__(self, theta: Tensor, reference: Tensor) -> None:
        self.theta = theta.clone().requires_grad_()
        self.reference, self.policy = reference, self

    @staticmethod
    def at(theta: Tensor, latents: Tensor, sigma: Tensor) -> Tensor:
        level = sigma.reshape(-1, *[1] * (latents.ndim - 1))
        return theta[0] * latents + theta[1] * level + theta[2:]

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        return self.at(self.theta, latents, sigma)

    def reference_velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        return self.at(self.reference, latents, sigma)

    teacher_velocity = reference_velocity

    @contextmanager
    def holding(self, values: Sequence[Tensor]) -> Iterator[None]:
        own, self.theta = self.theta, values[0]
        try:
            yield
        finally:
            self.theta = own


def liking(latents: Tensor, subjects: Subjects, questions: Sequence[Question]) -> Tensor:
    """Rewards that like latents near 0.1 for each letter of a prompt."""
    total = torch.zeros(len(latents), dtype=latents.dtype)
    for question in questions:
        wanted = torch.tensor([0.1 * len(prompt) for prompt in question.prompts], dtype=latents.dtype)
        total = total - question.factor * ((latents - wanted.reshape(-1, 1, 1)) ** 2).flatten(1).mean(1)
    return total


def subjects_of(rows: int, first: int = 0) -> Subjects:
    """Return what rewards are given of rows; their draws are whole numbers in order."""
    names = tuple("abcdefgh"[: row + 1] for row in range(rows))
    return Subjects(prompts=names, metadata=({},) * rows, samples=names, draws=tuple(range(first, first + rows)))


def models_of(
    toy: Toy, behavior: Sequence[float] | Tensor = BEHAVIOR, kernel: Kernel | None = None, **further: Any
) -> DiffusionModels:
    held = behavior if isinstance(behavior, Tensor) else vector(behavior)
    return DiffusionModels(trainable=toy, kernel=kernel or FlowSDE(0.7), behavior=[held], **further)  # type: ignore[arg-type]


def draws(count: int, *shape: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(count)]


def common(advantages: Sequence[float], units: Sequence[int]) -> dict[str, Any]:
    rows = len(advantages)
    return {
        "advantages": vector(advantages),
        "conditioning": Conditioning({}),
        "weights": torch.ones(rows, dtype=torch.float64),
        "units": torch.tensor(units),
        "importance": torch.ones(rows, dtype=torch.float64),
        "count": rows,
        "age": torch.zeros(rows, dtype=torch.int64),
        "step": torch.arange(rows),
        "keys": tuple((row, 0) for row in range(rows)),
    }


def transitions(
    advantages: Sequence[float],
    theta: Tensor,
    *,
    sigma: Sequence[float] = (0.9, 0.7, 0.5, 0.3),
    dt: float = 0.1,
    mirrored: bool = False,
) -> TransitionBatch:
    """Return steps drawn with ``theta``; ``mirrored``: all from one state, each second with the noise of the first."""
    rows = len(advantages)
    levels = vector(sigma[:rows])
    latents, noise = draws(2, rows, *SHAPE)
    if mirrored:
        latents, noise = latents[:1].expand_as(latents), noise[:1] * vector([1, -1] * (rows // 2)).reshape(-1, 1, 1)
    grid = Grid(levels, levels - dt, torch.full_like(levels, 0.8))
    step = FlowSDE(0.7).step(latents, Toy.at(theta, latents, levels), grid)
    following = step.sample(noise)
    return TransitionBatch(
        latents=latents,
        next_latents=following,
        grid=grid,
        old_log_probs=step.log_prob(following),
        old_means=step.mean,
        mean_std=torch.full_like(levels, 0.25),
        mean_rectifier=torch.full_like(levels, 2.0),
        finals=following - 0.3 * latents,
        **common(advantages, range(rows)),
    )


def states(calls: int = 1, *, rows: int = 4, first: int = 0) -> StateBatch:
    """Return states that ``calls`` steps of 0.2 follow, from levels around 0.8."""
    start = vector([0.9, 0.8, 0.7, 0.65, 0.6, 0.55][:rows])
    (latents,) = draws(1, rows, *SHAPE, seed=2)
    return StateBatch(
        latents=latents,
        grid=Grid(start, start - 0.2, torch.full_like(start, 0.8)),
        levels=torch.stack([start - 0.2 * step for step in range(calls)], 1),
        subjects=subjects_of(rows, first),
        **common([0.0] * rows, range(rows)),
    )


def noised(
    advantages: Sequence[float],
    units: Sequence[int],
    *,
    sigma: Sequence[float] = (0.8, 0.6, 0.4, 0.2),
    mirrored: bool = False,
    clean: Tensor | None = None,
    noise: Tensor | None = None,
) -> ForwardBatch:
    """Return noised samples; ``mirrored``: one noise and level, each second sample the opposite of the first."""
    rows = len(advantages)
    levels = vector(sigma[:rows])
    drawn = draws(2, rows, *SHAPE, seed=1)
    clean, noise = drawn[0] if clean is None else clean, drawn[1] if noise is None else noise
    if mirrored:
        clean = clean[:1] * vector([1, -1] * (rows // 2)).reshape(-1, 1, 1)
        noise, levels = noise[:1].expand_as(noise), levels[:1].expand_as(levels)
    level = levels.reshape(-1, 1, 1)
    return ForwardBatch(
        latents=(1 - level) * clean + level * noise,
        clean=clean,
        noise=noise,
        grid=Grid(levels, torch.zeros_like(levels), levels),
        subjects=subjects_of(rows),
        **common(advantages, units),
    )
