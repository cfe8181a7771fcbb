"""What an algorithm declares and computes. The training loop knows no algorithm by name.

Legend: B rows of a micro-batch, ... latent dims.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from models.adapters import Trainable
from models.policies.base import Conditioning
from models.transitions import Gaussian, Grid, Kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirements:
    """What an algorithm needs from rollouts; ``flowmill check`` compares it with the config before any work."""

    log_probs: bool = False
    """Stored log-probs of stochastic steps."""
    min_group_size: int = 1
    """Samples per prompt."""
    reference: bool = False
    """Velocities of the base model."""
    zero_advantages: bool = False
    """Rows with advantage 0 still contribute (a KL term does); otherwise they cost no forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """B (sample, step) rows, steps and samples freely mixed."""

    latents: Tensor
    """(B, ...) float32 state before the step."""
    next_latents: Tensor
    """(B, ...) float32 state after the step."""
    grid: Grid
    """Noise levels of each row."""
    old_log_probs: Tensor
    """(B,) float32 behavior log-probs."""
    advantages: Tensor
    """(B,) float32."""
    conditioning: Conditioning
    """B rows."""
    weights: Tensor
    """(B,) float32: 1, or 0 for rows that only pad the batch to its fixed size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """What an algorithm may ask for."""

    trainable: Trainable
    """The policy being trained."""
    kernel: Kernel
    """The rollout's stochastic step."""

    def velocity(self, batch: Batch) -> Tensor:
        """Return (B, ...) velocities of the policy, with gradient."""
        return self.trainable.policy.velocity(batch.latents, batch.grid.sigma, batch.conditioning)

    def reference_velocity(self, batch: Batch) -> Tensor:
        """Return (B, ...) velocities of the base model, without gradient."""
        return self.trainable.reference_velocity(batch.latents, batch.grid.sigma, batch.conditioning)

    def step(self, batch: Batch, velocity: Tensor) -> Gaussian:
        """Return the distribution of the next latents under a velocity."""
        return self.kernel.step(batch.latents, velocity, batch.grid)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLoss:
    """A loss per row, averaged by the loop over all rows of an update."""

    loss: Tensor
    """(B,) with gradient."""
    metrics: Mapping[str, Tensor]
    """(B,) figures per row without gradient; the loop reports their means."""


class Algorithm(Protocol):
    """One training objective."""

    @property
    def requires(self) -> Requirements:
        """What it needs."""
        ...

    def loss(self, batch: Batch, models: Models) -> RowLoss:
        """Return the loss of every row."""
        ...
