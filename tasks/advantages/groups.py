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
    """Return statistics of (N,) rewards by (N,) group index in 0 .. G-1; two passes avoid cancellation."""
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
    """How rewards are centered and divided; the public trainers differ in every part of it.

    Flow-GRPO: population std + 1e-4. DanceGRPO: unbiased std + 1e-8. Flow-Factory: max(population std, 1e-6).
    """

    std: Literal["group", "global", "none"] = "group"
    """Scope of the standard deviation; 'none' means no division (Dr.GRPO, arXiv 2503.20783)."""
    epsilon: float = 1e-4
    """Added to the std, or its lower bound."""
    floor: Literal["add", "max"] = "add"
    """Add epsilon, or take it as the lower bound."""
    unbiased: bool = False
    """Divide squares by n - 1."""
    mean: Literal["group", "global", "leave_one_out"] = "group"
    """Scope of the mean. 'global' goes with a global std (MMDanceGRPO: unbiased std, + 1e-8); 'leave_one_out', the mean
    of the other samples of the group, goes with no std (RLOO, arXiv 2402.14740)."""

    def scale(self, rewards: Tensor, groups: Tensor) -> Tensor:
        """Return the divisor of each of (N,) rewards, float64."""
        if self.std == "global":
            return self.divisor(rewards).expand(len(rewards))
        count = torch.bincount(groups).double()
        if self.std == "none":
            # r - (n m - r) / (n - 1) = (r - m) n / (n - 1), so the leave-one-out mean only changes the scale.
            others = (count - 1) / count if self.mean == "leave_one_out" else torch.ones_like(count)
            return others[groups]
        return self._bounded(self._corrected(group_statistics(rewards, groups).std, count))[groups]

    def divisor(self, rewards: Tensor) -> Tensor:
        """Return the common divisor of (N,) rewards, a float64 scalar; the std of a single reward is 0."""
        values = rewards.double()
        return self._bounded(self._corrected(values.std(correction=0), torch.tensor(len(values)).double()))

    def _corrected(self, std: Tensor, count: Tensor) -> Tensor:
        return std * torch.sqrt(count / (count - 1).clamp(min=1)) if self.unbiased else std

    def _bounded(self, std: Tensor) -> Tensor:
        """Return the divisor; infinity where std and epsilon are 0, so that advantages are 0."""
        divisor = std + self.epsilon if self.floor == "add" else std.clamp(min=self.epsilon)
        return torch.where(divisor > 0, divisor, torch.inf)


def composed(values: Tensor, *, threshold: float | None = None, standardize: bool = False) -> Tensor:
    """Return (N,) scores as they enter the weighted sum, float64; NaN where there is no score.

    Args:
        values: scores, NaN if missing.
        threshold: replaces scores: 1 where the score reaches it, both as float32, which scores are stored in, else 0.
        standardize: afterwards, (x - mean) / population std over all scores; zeros if all are equal.
    """
    valid = ~values.isnan()
    scores = values.double()
    if threshold is not None:
        scores = torch.where(valid, (scores.float() >= torch.tensor(threshold)).double(), scores)
    if standardize and bool(valid.any()):
        centered = scores - scores[valid].mean()
        std = scores[valid].std(correction=0)
        scores = torch.where(valid, centered / std if std > 0 else torch.zeros_like(scores), scores)
    return scores


def contributions(parts: Sequence[Tensor], groups: Tensor) -> list[float] | None:
    """Return the share of each weighted reward in the spread of their sum within groups; shares add up to 1.

    The share of a reward is its covariance with the sum, divided by the variance of the sum. A reward that is constant
    within groups has share 0, regardless of its weight. A reward that opposes the others has a negative share.

    Args:
        parts: per reward, (N,) weighted values.
        groups: (N,) group index in 0 .. G-1.

    Returns:
        None if no group has any spread.
    """
    centered = []
    for part in parts:
        statistics = group_statistics(part, groups)
        centered.append(torch.where(statistics.constant[groups], 0.0, part.double() - statistics.mean[groups]))
    total = torch.stack(centered).sum(0)
    spread = float(total.square().sum())
    return None if spread == 0.0 else [float((part * total).sum()) / spread for part in centered]


def group_advantages(rewards: Tensor, groups: Tensor, normalizer: Normalizer) -> Tensor:
    """Return (N,) float64 advantages (r - mean) / scale; exactly 0 where all rewards behind the mean are equal.

    With the default normalizer this is Flow-GRPO's ``PerPromptStatTracker.update``: a group with equal rewards gets
    advantages 0. With a global mean such a group lies above or below the others.

    Args:
        rewards: (N,) rewards.
        groups: (N,) int64 group index in 0 .. G-1.
        normalizer: the divisor.
    """
    if normalizer.mean == "global":
        groups = torch.zeros_like(groups)
    statistics = group_statistics(rewards, groups)
    advantages = (rewards.double() - statistics.mean[groups]) / normalizer.scale(rewards, groups)
    return torch.where(statistics.constant[groups], 0.0, advantages)


def gdpo_advantages(
    rewards: Sequence[Tensor],
    weights: Sequence[float],
    groups: Tensor,
    normalizer: Normalizer,
    *,
    penalty: Tensor | None = None,
) -> Tensor:
    """Return (N,) float64 GDPO advantages: each reward normalized in its group, summed, normalized over all.

    sum_k w_k (r_k - mean_g) / std_g, then (x - mean) / std over all samples: Flow-Factory's 'gdpo', in float64 and two
    passes, where the public code's float32 sum of squares can go negative. A reward that is constant in a group
    contributes 0 there; a group in which all rewards are constant gets exactly 0.

    A penalty P enters every term: w_k r_k - P replaces w_k r_k, in the units of the weighted sum. With one reward this
    equals 'sum' up to the last division, regardless of its weight. No published method covers several rewards.

    Args:
        rewards: (N,) per reward model.
        weights: one per reward model; a reward of weight 0 is left out.
        groups: (N,) int64 group index.
        normalizer: the divisor, within groups and over all.
        penalty: (N,) amount subtracted from each sample's weighted rewards.

    Raises:
        ValueError: the normalizer's std is not the group's.
    """
    if normalizer.std != "group":
        raise ValueError("GDPO divides every reward by the std of its group")
    counted = [(reward.double(), weight) for reward, weight in zip(rewards, weights, strict=True) if weight != 0]
    less = [reward if penalty is None else reward - penalty.double() / weight for reward, weight in counted]
    if not less:
        return torch.zeros(len(groups), dtype=torch.float64)
    parts = [w * group_advantages(r, groups, normalizer) for r, (_, w) in zip(less, counted, strict=True)]
    total = torch.stack(parts).sum(0)
    constant = torch.stack([group_statistics(reward, groups).constant for reward in less]).all(0)
    return torch.where(constant[groups], 0.0, (total - total.mean()) / normalizer.divisor(total))


def running_advantages(
    rewards: Tensor,
    groups: Tensor,
    history: Sequence[Tensor],
    normalizer: Normalizer,
    *,
    buffer: int,
    min_count: int,
) -> Tensor:
    """Return (N,) float64 advantages from each prompt's last rewards, this epoch's included (DDPO's ``stat_tracking``).

    (r - mean) / std, both over the prompt's last ``buffer`` rewards. The advantage is exactly 0 if these are all equal.
    A group that is constant in this epoch but was not before can get nonzero ones.

    Args:
        rewards: (N,) rewards of this epoch.
        groups: (N,) int64 group index in 0 .. G-1.
        history: per group, its prompt's rewards of earlier epochs, oldest first.
        normalizer: the divisor; its scope ``std`` is ignored.
        buffer: the number of last rewards that count.
        min_count: prompts with fewer rewards use mean and std of the whole epoch.
    """
    values = rewards.double()
    advantages = torch.zeros_like(values)
    members = torch.argsort(groups, stable=True).split(torch.bincount(groups, minlength=len(history)).tolist())
    for earlier, rows in zip(history, members, strict=True):
        recent = torch.cat([earlier.double(), values[rows]])[-buffer:]
        pool = recent if len(recent) >= min_count else values
        if bool((pool != pool[0]).any()):
            advantages[rows] = (values[rows] - pool.mean()) / normalizer.divisor(pool)
    return advantages


def shape_advantages(
    advantages: Tensor,
    groups: Tensor,
    *,
    mode: str = "all",
    best_of: int | None = None,
    clip: float | tuple[float, float] = 5.0,
    soft_clip: float | None = None,
) -> Tensor:
    """Return (N,) float32 advantages, clipped, with some set to 0 (which saves their forward) or to +-1.

    Samples are ranked before clipping, because clipping makes different advantages equal. Ties rank by position.

    Args:
        advantages: (N,).
        groups: (N,) int64 group index.
        mode: 'all'; 'positive_only' and 'negative_only' drop the other sign (DiffusionNFT's ``adv_mode``); 'binary'
            keeps the sign alone; 'best_worst' is +1 for a group's best and -1 for its worst (Flow-GRPO's 'dpo' type),
            and 0 for a group whose advantages are all equal.
        best_of: keep the best and the worst ``best_of / 2`` of each group (DanceGRPO's ``bestofn``).
        clip: bound of the absolute advantage, or its lowest and highest value.
        soft_clip: instead of ``clip``, the eta of eta tanh(A / eta) (V-GRPO, arXiv 2604.23380).
    """
    exact = advantages.double()
    rank, size = group_ranks(exact, groups)
    if mode == "best_worst":
        live = ~group_statistics(exact, groups).constant[groups]
        return (live & (rank == size - 1)).float() - (live & (rank == 0)).float()
    low, high = clip if isinstance(clip, tuple) else (-clip, clip)
    shaped = exact.clamp(low, high) if soft_clip is None else soft_clip * torch.tanh(exact / soft_clip)
    if best_of is not None:
        shaped = torch.where((rank < best_of // 2) | (rank >= size - best_of // 2), shaped, 0.0)
    if mode == "positive_only":
        shaped = shaped.clamp(min=0)
    elif mode == "negative_only":
        shaped = shaped.clamp(max=0)
    elif mode == "binary":
        shaped = torch.sign(shaped)
    return shaped.float()


def groups_within(rewards: Tensor, groups: Tensor, *, low: float | None, high: float | None) -> Tensor:
    """Return (N,) bool: the mean reward of the sample's group is neither below ``low`` nor above ``high``, as float32,
    which scores are stored in."""
    means = group_statistics(rewards, groups).mean.float()
    inside = torch.ones_like(means, dtype=torch.bool)
    if low is not None:
        inside &= means >= torch.tensor(low)
    if high is not None:
        inside &= means <= torch.tensor(high)
    return inside[groups]


def informative_groups(rewards: Tensor, groups: Tensor, counted: Tensor) -> Tensor:
    """Return the groups whose rewards are not all equal, ascending: only these have nonzero advantages within groups.

    Args:
        rewards: (N,).
        groups: (N,) int64 group index.
        counted: (N,) bool: the rewards that count; all others may be NaN.
    """
    present, numbers = groups[counted].unique(return_inverse=True)
    saying: Tensor = present[~group_statistics(rewards[counted], numbers).constant]
    return saying


def diversity_weighted(advantages: Tensor, groups: Tensor, distances: Tensor) -> Tensor:
    """Return (N,) float64 advantages, with those above 0 multiplied by d / group mean of d (GARDO, arXiv 2512.24138).

    Args:
        advantages: (N,).
        groups: (N,) int64 group index.
        distances: (N,) d >= 0, the distance of a sample from the others of its group. The factor is 1 where it is
            unknown (NaN), and in a group whose distances are all 0.
    """
    valid = ~distances.isnan()
    count = torch.bincount(groups[valid], minlength=int(groups.max()) + 1).double()
    total = torch.zeros_like(count).index_add_(0, groups[valid], distances[valid].double())
    mean = (total / count)[groups]
    weight = torch.where(valid & (mean > 0), distances.double() / mean, 1.0)
    return torch.where(advantages > 0, weight * advantages.double(), advantages.double())


def group_ranks(values: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's rank within its group, 0 the smallest (ties by position), and the group's size."""
    by_value = torch.argsort(values, stable=True)
    order = by_value[torch.argsort(groups[by_value], stable=True)]
    size = torch.bincount(groups)
    start = torch.cumsum(size, 0) - size
    rank = torch.empty_like(groups)
    rank[order] = torch.arange(len(values)) - start[groups[order]]
    return rank, size[groups]
