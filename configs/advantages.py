"""Settings of advantages and replay: weights of samples before an objective sees them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from flowmill.configs.base import Component, Later, Section


class OverlongSection(Section):
    """Treatment of texts near the most tokens they may have (DAPO, arXiv 2503.14476)."""

    buffer: int = Field(ge=1)
    """Tokens before the limit over which a penalty grows from 0 to ``factor``; with turns, of all together."""
    factor: float = Field(1.0, ge=0)
    """Subtracted from the score of a text of the full length."""
    exclude: bool = False
    """Exclude texts that were truncated at the maximum length, in any turn, from training and statistics."""


class AdvantageSection(Section):
    """How rewards become advantages."""

    removed: ClassVar[Mapping[str, str]] = {
        "threshold": "group_mean_min leaves out groups of low rewards, best_of all but the extremes of each group.",
        "below": "It was the factor of advantages below 'threshold', which no longer exists either. Remove it.",
    }
    former: ClassVar[Mapping[str, Any]] = {"threshold": None, "below": 0.0}
    estimator: Annotated[Component, Later()] = Component(name="group")
    """'group', or a class derived from it: one advantage per sample, computed with the other settings here. For
    language models also one per token: gae, reinforce, rloo, reinforce_plus_plus. When absent, the algorithm's."""
    aggregation: Literal["sum", "gdpo"] = "sum"
    """Weighted sum of rewards, then normalization; or each reward normalized in its group first (GDPO)."""
    std: Literal["group", "global", "running", "none"] = "group"
    """Divide by the std of the group, of all rewards of the epoch, or of the prompt's last rewards (DDPO), or do not
    divide (Dr.GRPO). ``mean`` sets the mean, except with 'running', which uses that of the prompt's last rewards."""
    mean: Annotated[Literal["group", "global", "leave_one_out"], Later()] = "group"
    """Subtract the mean of the group; with std 'global' optionally that of all rewards of the epoch, (r - mean) / std
    over all, MMDanceGRPO's default; with std 'none' optionally that of the other samples of the group (RLOO)."""
    epsilon: float = Field(1e-4, ge=0)
    """Added to the standard deviation, or used as its lower bound."""
    floor: Literal["add", "max"] = "add"
    """Whether epsilon is added (Flow-GRPO) or is a lower bound (Flow-Factory)."""
    unbiased: bool = False
    """Standard deviation with n - 1 (DanceGRPO)."""
    buffer: int = Field(16, ge=1)
    """With std 'running', the number of a prompt's last rewards in its statistics."""
    min_count: int = Field(16, ge=1)
    """With std 'running', prompts with fewer rewards use the whole epoch's mean and std."""
    mode: Literal["all", "positive_only", "negative_only", "binary", "best_worst"] = "all"
    """The advantages that are kept; 'binary' keeps only their sign."""
    best_of: int | None = Field(None, ge=2, multiple_of=2)
    """Keep the best and worst best_of / 2 samples of each group, ranked before clipping."""
    clip: Annotated[float, Field(gt=0)] | tuple[Annotated[float, Field(lt=0)], Annotated[float, Field(gt=0)]] = 5.0
    """Advantages are clipped to +-clip, or to [low, high] with low below 0 and high above."""
    soft_clip: Annotated[float | None, Later()] = Field(None, gt=0)
    """Instead of clip, bound advantages smoothly, keeping their order: soft_clip tanh(A / soft_clip) (V-GRPO: 3)."""
    group_mean_min: float | None = None
    """Groups whose mean reward is below this get advantage 0 (MMDanceGRPO's ``reward_threshold``)."""
    group_mean_max: float | None = None
    """Groups whose mean reward is above this get advantage 0: they are already solved."""
    informative: Annotated[int | None, Later()] = Field(None, ge=1)
    """Train on the first this many groups of an epoch whose rewards are not all equal, and exclude the others, so that
    every epoch trains on equally many: DAPO's dynamic sampling (arXiv 2503.14476). Set rollout.prompts_per_epoch larger
    than this by the number of groups expected to have equal rewards. All groups when absent."""
    overlong: Annotated[OverlongSection | None, Later()] = None
    """For language models: penalize long texts, or exclude truncated ones."""
    diversity: Annotated[str | None, Later()] = None
    """Label of a monitor that measures how much a sample differs from the others of its group. Advantages above 0 are
    multiplied by that score over its mean in the group, so that rare good samples count more (GARDO)."""
    kl_coef: float = Field(0.0, ge=0)
    """Coefficient of the KL to the base model, mean over the trained steps, that is subtracted from each sample's
    weighted reward (with 'gdpo' from each reward) before all other settings here apply. Rollouts then also run the base
    model at every trained step."""
    kl_gate: Annotated[float | None, Later()] = Field(None, gt=0, le=1)
    """Subtract that KL only from this share of the samples: those that the reward ranks highest compared with the
    monitors (GARDO). From all samples when absent."""


class ReplaySection(Section):
    """Training on the stored trajectories of earlier epochs.

    Old log-probs and means of stale rows are computed again under the policy at the epoch's start (decoupled PPO, arXiv
    2110.00641): the ratio is clipped around that policy, and an importance weight corrects for the behavior policy.
    """

    removed: ClassVar[Mapping[str, str]] = {
        "proximal": "Rows of older policies are always corrected. Remove it.",
        "weight": "Weights are the exp of the mean log-ratio, truncated at max_importance. Remove it.",
        "level": "Each trained step has a weight of its own. Remove it.",
    }
    former: ClassVar[Mapping[str, Any]] = {"proximal": True, "weight": "tempered", "level": "step"}
    epochs: int = Field(1, ge=0)
    """Number of earlier epochs that are also trained on. 0: none, but with execution.ahead the rows of the current
    epoch are corrected with the other settings here."""
    max_importance: float = Field(2.0, gt=0)
    """Importance weights are truncated here."""
    share: Annotated[float, Later()] = Field(1.0, gt=0, le=1)
    """Share of the samples of every earlier epoch to train on again, those with the highest reward; for algorithms that
    compare samples, a share of the groups, those with the highest mean. Their advantages stay unchanged."""
    steps: Annotated[int | None, Later()] = Field(None, ge=1)
    """For earlier epochs, train only on steps before this one (counted from 0): later steps have little noise, so their
    ratios to another policy are far from 1. All steps when absent."""
