"""Settings of advantages and replay: weights of samples before an objective sees them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from configs.base import Component, Later, Section


class OverlongSection(Section):
    """Treatment of texts near the most tokens they may have (DAPO, arXiv 2503.14476)."""

    buffer: int = Field(ge=1)
    """Tokens before the limit over which a penalty grows from 0 to ``factor``."""
    factor: float = Field(1.0, ge=0)
    """Subtracted from the score of a text of the full length."""
    exclude: bool = False
    """Leave texts that are as long as may be out of training and statistics: they were cut."""


class AdvantageSection(Section):
    """How rewards become advantages."""

    estimator: Annotated[Component, Later()] = Component(name="group")
    """One advantage per sample, as all other settings here say; of language models also one per token: gae, reinforce,
    rloo, reinforce_plus_plus. When absent the one its algorithm needs."""
    aggregation: Literal["sum", "gdpo"] = "sum"
    """Weighted sum of rewards, then normalization; or each reward normalized in its group first (GDPO)."""
    std: Literal["group", "global", "running", "none"] = "group"
    """Divide by the std of the group, of all rewards of the epoch, or of the prompt's last rewards (DDPO), or by
    nothing (Dr.GRPO); the mean is that of ``mean``, but with 'running' that of the prompt's last rewards."""
    mean: Annotated[Literal["group", "global", "leave_one_out"], Later()] = "group"
    """Subtract the mean of the group, or with std 'global' that of all rewards of the epoch: (r - mean) / std over all,
    MMDanceGRPO's default; or with std 'none' that of the others of the group (RLOO)."""
    epsilon: float = Field(1e-4, ge=0)
    """Added to the standard deviation, or its lower bound."""
    floor: Literal["add", "max"] = "add"
    """Whether epsilon is added (Flow-GRPO) or a lower bound (Flow-Factory)."""
    unbiased: bool = False
    """Standard deviation with n - 1 (DanceGRPO)."""
    buffer: int = Field(16, ge=1)
    """Rewards of a prompt that count, with std 'running'."""
    min_count: int = Field(16, ge=1)
    """With std 'running', prompts with fewer rewards use the whole epoch's mean and std."""
    mode: Literal["all", "positive_only", "negative_only", "binary", "best_worst"] = "all"
    """Which advantages are kept, and whether only their sign counts."""
    best_of: int | None = Field(None, ge=2, multiple_of=2)
    """Keep the best and worst best_of / 2 samples of each group, ranked before clipping."""
    clip: Annotated[float, Field(gt=0)] | tuple[Annotated[float, Field(lt=0)], Annotated[float, Field(gt=0)]] = 5.0
    """Advantages are clipped to +-clip, or to [low, high] with low below 0 and high above."""
    soft_clip: Annotated[float | None, Later()] = Field(None, gt=0)
    """Instead of at clip, bound advantages softly: soft_clip tanh(A / soft_clip), whose order stays (V-GRPO: 3)."""
    group_mean_min: float | None = None
    """Groups whose mean reward is below this get advantage 0 (MMDanceGRPO's ``reward_threshold``)."""
    group_mean_max: float | None = None
    """Groups whose mean reward is above this get advantage 0: there is nothing left to learn from them."""
    threshold: float | None = None
    """Advantages of samples whose reward is below this are multiplied by ``below``."""
    below: float = Field(0.0, ge=0)
    """Factor for samples below the threshold; 0 drops them, at no cost of a forward."""
    informative: Annotated[int | None, Later()] = Field(None, ge=1)
    """Train on the first so many groups of an epoch whose rewards are not all equal, and leave the others out, so that
    every epoch trains on as many: DAPO's dynamic sampling (arXiv 2503.14476), for which rollout.prompts_per_epoch is
    larger than this by as much as groups are expected to say nothing. All groups when absent."""
    overlong: Annotated[OverlongSection | None, Later()] = None
    """Of language models: punish long texts, or leave out those that were cut."""
    diversity: Annotated[str | None, Later()] = None
    """Label of a monitor of how unlike the others of its group a sample is: advantages above 0 are multiplied by that
    score over its mean in the group, so that rare good samples count more than common ones (GARDO)."""
    kl_coef: float = Field(0.0, ge=0)
    """Subtract so many times the KL to the base model, mean over the trained steps, from each sample's weighted reward
    (with 'gdpo' from each of them), before everything else here; rollouts then run the base model too, at every
    trained step."""
    kl_gate: Annotated[float | None, Later()] = Field(None, gt=0, le=1)
    """Subtract that KL from the samples alone that the reward ranks higher than the monitors do, this share of them
    (GARDO); from all when absent."""


class ReplaySection(Section):
    """Training on the stored trajectories of earlier epochs, which only a durable store can offer."""

    epochs: int = Field(1, ge=0)
    """How many epochs before the current one are trained on too; older ones are too stale. 0: none, but with
    execution.ahead the rows of the current one are corrected as the other settings here say."""
    proximal: bool = True
    """Recompute old log-probs and means of stale rows under the policy at the epoch's start (decoupled PPO, arXiv
    2110.00641): the ratio is clipped around that policy, and an importance weight corrects for the behavior policy."""
    weight: Literal["tempered", "density"] = "tempered"
    """Importance weights as exp of the log-ratio's mean over latent dims, the root of the density ratio that log-probs
    are elsewhere too; or the density ratio itself, which belongs to ``reduce: sum`` and leaves few samples."""
    max_importance: float = Field(2.0, gt=0)
    """Importance weights are truncated here."""
    level: Literal["step", "sequence"] = "step"
    """One importance weight per step, or per sample: over its trained steps the geometric mean of tempered weights, the
    product of densities."""
    share: Annotated[float, Later()] = Field(1.0, gt=0, le=1)
    """Of every earlier epoch, train on this share of its samples again, those of the highest reward; where an algorithm
    compares samples, of its groups, those of the highest mean. Their advantages stay unchanged."""
    steps: Annotated[int | None, Later()] = Field(None, ge=1)
    """Of earlier epochs, train on steps before this one alone (counted from 0): the later ones have little noise, so
    that ratios to another policy are far from 1. All when absent."""
