"""Group advantages. Pure: tensors in, tensors out, float64 inside.

Legend: N samples, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class GroupStatistics:
    """Statistics of rewards by group."""

    mean: Tensor
    """(G,) float64."""
    std: Tensor
    """(G,) float64, population."""
    constant: Tensor
    """(G,) bool: all rewards of the group are equal."""


def group_statistics(rewards: Tensor, groups: Tensor) -> GroupStatistics:
    """Return statistics of (N,) rewards by (N,) group index in 0 .. G-1; two passes, so no cancellation."""
    values = rewards.double()
    count = torch.bincount(groups).double()
    total = torch.zeros_like(count).index_add_(0, groups, values)
    mean = total / count
    squares = torch.zeros_like(count).index_add_(0, groups, (values - mean[groups]) ** 2)
    low = torch.full_like(count, float("inf")).scatter_reduce_(0, groups, values, "amin")
    high = torch.full_like(count, float("-inf")).scatter_reduce_(0, groups, values, "amax")
    return GroupStatistics(mean, torch.sqrt(squares / count), low == high)


def group_advantages(
    rewards: Tensor, groups: Tensor, *, std: Literal["group", "global"], epsilon: float, clip: float
) -> Tensor:
    """Return (N,) float32 advantages (r - mean_group) / (std + epsilon), clipped to +-clip.

    Flow-GRPO's ``PerPromptStatTracker.update``: population std of the group, or of all rewards with 'global'; the mean
    is always the group's. A group whose rewards are all equal gets exactly 0.

    Args:
        rewards: (N,) rewards.
        groups: (N,) int64 group index in 0 .. G-1.
        std: whose standard deviation.
        epsilon: added to it.
        clip: bound of the absolute advantage.
    """
    statistics = group_statistics(rewards, groups)
    centered = rewards.double() - statistics.mean[groups]
    if std == "group":
        scale = statistics.std[groups]
    else:
        values = rewards.double()
        scale = torch.sqrt(((values - values.mean()) ** 2).mean())
    advantages = (centered / (scale + epsilon)).clamp(-clip, clip)
    return torch.where(statistics.constant[groups], 0.0, advantages).float()
