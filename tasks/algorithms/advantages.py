"""Group advantages. Pure: tensors in, tensors out, float64 inside.

Legend: N samples, G groups.
"""

from __future__ import annotations

from collections.abc import Sequence
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalizer:
    """How centered rewards are divided; the public trainers differ in every part of it.

    Flow-GRPO: population std + 1e-4. DanceGRPO: unbiased std + 1e-8. Flow-Factory: max(population std, 1e-6).
    """

    std: Literal["group", "global"] = "group"
    """Whose standard deviation; the mean is always the group's."""
    epsilon: float = 1e-4
    """Added to the std, or its lower bound."""
    floor: Literal["add", "max"] = "add"
    """Add epsilon, or take it as the lower bound."""
    unbiased: bool = False
    """Divide squares by n - 1."""

    def scale(self, rewards: Tensor, groups: Tensor) -> Tensor:
        """Return the divisor of each of (N,) rewards, float64."""
        values = rewards.double()
        if self.std == "global":
            std = values.std(correction=int(self.unbiased)).expand(len(values))
        else:
            count = torch.bincount(groups).double()
            correction = torch.sqrt(count / (count - 1).clamp(min=1)) if self.unbiased else torch.ones_like(count)
            std = (group_statistics(rewards, groups).std * correction)[groups]
        return std + self.epsilon if self.floor == "add" else std.clamp(min=self.epsilon)


def group_advantages(rewards: Tensor, groups: Tensor, normalizer: Normalizer) -> Tensor:
    """Return (N,) float64 advantages (r - mean_group) / scale; a group whose rewards are all equal gets exactly 0.

    Flow-GRPO's ``PerPromptStatTracker.update`` with the default normalizer.

    Args:
        rewards: (N,) rewards.
        groups: (N,) int64 group index in 0 .. G-1.
        normalizer: the divisor.
    """
    statistics = group_statistics(rewards, groups)
    advantages = (rewards.double() - statistics.mean[groups]) / normalizer.scale(rewards, groups)
    return torch.where(statistics.constant[groups], 0.0, advantages)


def gdpo_advantages(
    rewards: Sequence[Tensor], weights: Sequence[float], groups: Tensor, normalizer: Normalizer
) -> Tensor:
    """Return (N,) float64 GDPO advantages: each reward normalized in its group, summed, normalized over all.

    Flow-Factory's 'gdpo'; in float64 and two passes, where the public code's float32 sum of squares can go negative.

    Args:
        rewards: (N,) per reward model.
        weights: one per reward model.
        groups: (N,) int64 group index.
        normalizer: the divisor within groups.
    """
    parts = [w * group_advantages(r, groups, normalizer) for r, w in zip(rewards, weights, strict=True)]
    total = torch.stack(parts).sum(0)
    std = total.std(correction=0)
    spread = std + normalizer.epsilon if normalizer.floor == "add" else std.clamp(min=normalizer.epsilon)
    constant = torch.stack([group_statistics(reward, groups).constant for reward in rewards]).all(0)
    return torch.where(constant[groups], 0.0, (total - total.mean()) / spread)


def running_advantages(
    rewards: Tensor, groups: Tensor, history: Sequence[Tensor], *, buffer: int, min_count: int, epsilon: float = 1e-6
) -> Tensor:
    """Return (N,) float64 advantages from each prompt's last rewards, this epoch's included (DDPO's ``stat_tracking``).

    Args:
        rewards: (N,) rewards of this epoch.
        groups: (N,) int64 group index in 0 .. G-1.
        history: per group, its prompt's rewards of earlier epochs, oldest first.
        buffer: how many of the last rewards count.
        min_count: prompts with fewer use mean and std of the whole epoch.
        epsilon: added to the std.
    """
    values = rewards.double()
    advantages = torch.zeros_like(values)
    for group, earlier in enumerate(history):
        rows = groups == group
        recent = torch.cat([earlier.double(), values[rows]])[-buffer:]
        pool = recent if len(recent) >= min_count else values
        advantages[rows] = (values[rows] - pool.mean()) / (pool.std(correction=0) + epsilon)
    return advantages


def shape_advantages(
    advantages: Tensor, groups: Tensor, *, mode: str = "all", best_of: int | None = None, clip: float = 5.0
) -> Tensor:
    """Return (N,) float32 advantages, clipped, with some set to 0 (which costs no forward) or to +-1.

    Args:
        advantages: (N,).
        groups: (N,) int64 group index.
        mode: 'all'; 'positive_only' and 'negative_only' drop the other sign (DiffusionNFT's ``adv_mode``); 'binary'
            keeps the sign alone; 'best_worst' is +1 for a group's best and -1 for its worst (Flow-GRPO's 'dpo' type).
        best_of: keep the best and the worst ``best_of / 2`` of each group (DanceGRPO's ``bestofn``).
        clip: bound of the absolute advantage.
    """
    kept = advantages.double().clamp(-clip, clip)
    if best_of is not None:
        rank, size = group_ranks(kept, groups)
        kept = torch.where((rank < best_of // 2) | (rank >= size - best_of // 2), kept, 0.0)
    if mode == "positive_only":
        kept = kept.clamp(min=0)
    elif mode == "negative_only":
        kept = kept.clamp(max=0)
    elif mode == "binary":
        kept = torch.sign(kept)
    elif mode == "best_worst":
        rank, size = group_ranks(kept, groups)
        live = ~group_statistics(kept, groups).constant[groups]
        kept = torch.where(live & (rank == size - 1), 1.0, torch.where(live & (rank == 0), -1.0, 0.0)).double()
    return kept.float()


def damp_below(advantages: Tensor, rewards: Tensor, *, threshold: float, factor: float) -> Tensor:
    """Return advantages with those of samples below a reward threshold multiplied by a factor (0 drops them)."""
    return torch.where(rewards < threshold, advantages * factor, advantages)


def group_ranks(values: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's rank within its group, 0 the smallest (ties by position), and the group's size."""
    by_value = torch.argsort(values, stable=True)
    order = by_value[torch.argsort(groups[by_value], stable=True)]
    size = torch.bincount(groups)
    start = torch.cumsum(size, 0) - size
    rank = torch.empty_like(groups)
    rank[order] = torch.arange(len(values)) - start[groups[order]]
    return rank, size[groups]
