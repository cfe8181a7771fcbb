"""Gradients of rewards: requests and results of their computation, and weighted sums of stored ones for training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from flowmill.configs.errors import ConfigError
from flowmill.configs.rewards import RewardSection
from flowmill.configs.schema import RunConfig
from flowmill.storage.trajectories.gradients import StoredGradients
from flowmill.tasks.inputs.policy_kind import kind_name

if TYPE_CHECKING:
    from flowmill.tasks.runtime.host import ModelHost


def no_slopes(config: RunConfig) -> ConfigError:
    """Return the error for reward gradients of a kind whose samples have none."""
    return ConfigError(
        f"Samples of the kind '{kind_name(config)}' have no gradients of rewards. Choose an optimize.algorithm that "
        "needs no gradients."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardGradients:
    """The gradients of all rewards at the samples of one epoch or more."""

    parts: Sequence[tuple[float, StoredGradients]]
    """Weight and gradients of each reward."""

    def has(self, sample_id: str) -> bool:
        """Return whether a sample has a nonzero gradient of a reward with nonzero weight."""
        return any(weight != 0 and stored.rms(sample_id) > 0 for weight, stored in self.parts)

    def of(self, sample_id: str) -> np.ndarray:
        """Return the (...) float32 weighted sum at a sample that ``has`` one.

        The sum of several gradients is 0 if they cancel up to rounding.
        """
        weighted = [(weight, stored.of(sample_id)) for weight, stored in self.parts if weight != 0]
        terms = [np.float32(weight) * gradient for weight, gradient in weighted if gradient is not None]
        total: np.ndarray = np.asarray(sum(terms), np.float32)
        rounding = sum(abs(weight) * stored.rounding(sample_id) for weight, stored in self.parts if weight != 0)
        cancels = len(terms) > 1 and float(np.sqrt(np.mean(total.astype(np.float64) ** 2))) <= rounding
        return np.zeros_like(total) if cancels else total


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardGradientRequest:
    """Inputs of the computation of a reward's gradients."""

    config: RunConfig
    """The run's config."""
    host: ModelHost
    """Holds the models of the process."""
    section: RewardSection


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardGradientResult:
    """Scores and gradients of a reward for B samples."""

    values: np.ndarray
    """(B,) float32 scores."""
    gradients: np.ndarray
    """(B, ...) float32 gradients with respect to the final samples."""
