"""Estimators that turn rewards into the advantage of every sample or token: a table, one small class each.

The inputs of an estimator decide which stages a run has, so this module imports torch only when it computes.

Legend: N samples, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import NonNegativeFloat, PositiveFloat

from flowmill.configs.errors import ConfigError
from flowmill.configs.option_types import Share
from flowmill.configs.registry import Table, chosen
from flowmill.configs.schema import RunConfig

if TYPE_CHECKING:
    from torch import Tensor

ESTIMATORS = Table(
    {
        "group": "flowmill.tasks.advantages.estimators:Group",
        "gae": "flowmill.tasks.advantages.estimators:GAE",
        "reinforce": "flowmill.tasks.advantages.estimators:Reinforce",
        "rloo": "flowmill.tasks.advantages.estimators:LeaveOneOut",
        "reinforce_plus_plus": "flowmill.tasks.advantages.estimators:ReinforcePlusPlus",
    },
    like="flowmill.tasks.advantages.estimators:Estimator",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Earned:
    """Rewards of the samples of an epoch, and the further inputs of an estimator."""

    scores: Tensor
    """(N,) float64: the weighted sum of rewards."""
    groups: Tensor
    """(N,) int64."""
    mask: Tensor
    """(N, T) bool: tokens the policy chose."""
    kl: Tensor | None
    """(N, T) float64 KL of each token to the reference, if ``needs_reference``."""
    values: Tensor | None
    """(N, T) float64, if ``needs_values``."""
    kl_coef: float
    """Weight of the KL in this epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimated:
    """Inputs of training."""

    advantages: Tensor
    """(N, T) float64."""
    returns: Tensor
    """(N, T) float64: the target of a critic."""


class Estimator:
    """Computes advantages from rewards."""

    per_token: ClassVar[bool] = True
    """Every token has its own advantage; if False, each sample has one, shaped by the other ``advantage`` settings."""
    needs_values: ClassVar[bool] = False
    """It uses a critic's values."""

    @property
    def needs_reference(self) -> bool:
        """Whether it uses log-probs of the base model."""
        return False

    @property
    def adapts(self) -> bool:
        """Whether its KL coefficient adapts to the KL of the previous epoch."""
        return False

    def estimate(self, *earned: Any, **named: Any) -> Any:
        """Return advantages from rewards: ``Group`` has those of samples, ``TokenEstimator`` those of tokens."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class EarnedBySamples:
    """Rewards of the samples of an epoch."""

    scores: Tensor
    """(N,) float64: the weighted sum of rewards."""
    groups: Tensor
    """(N,) int64: samples of one prompt have one group."""
    normalized: Callable[[], Tensor]
    """Returns the (N,) float64 advantages by ``advantage.std``, ``mean``, ``aggregation`` and so on."""


@dataclass(frozen=True, kw_only=True)
class Group(Estimator):
    """One advantage per sample, within its group. All other settings of ``advantage`` apply to it.

    An estimator of advantages of samples is derived from it, and has its own ``estimate``.
    """

    per_token = False

    def estimate(self, earned: EarnedBySamples) -> Tensor:
        """Return (N,) advantages; they are then shaped by ``advantage.mode``, ``clip``, ``threshold`` and so on."""
        return earned.normalized()


@dataclass(frozen=True, kw_only=True)
class TokenEstimator(Estimator):
    """Base of all estimators over tokens: the KL to the base model is part of the reward."""

    kl_coef: NonNegativeFloat = 0.0
    """Weight of the KL to the base model in the reward of every token; 0: none."""
    kl: Literal["k1", "k2", "k3"] = "k1"
    """How that KL is estimated from the log-probs of the rollout."""
    target_kl: PositiveFloat | None = None
    """Nats per sample: after every epoch kl_coef rises where the KL is above, and falls where it is below."""
    horizon: PositiveFloat = 10_000.0
    """With target_kl: samples over which kl_coef changes by a fifth at most, as it does in an epoch of more."""

    def __post_init__(self) -> None:
        if self.target_kl is not None and self.kl_coef == 0:
            raise ValueError("target_kl is set, but kl_coef, from which it starts, is 0. Set kl_coef above 0.")

    @property
    def needs_reference(self) -> bool:
        """Whether the reward includes a KL."""
        return self.kl_coef > 0

    @property
    def adapts(self) -> bool:
        """Whether a target KL is set."""
        return self.target_kl is not None

    def next_kl_coef(self, kl_coef: float, kl: float, samples: int) -> float:
        """Return the coefficient of the next epoch, after ``samples`` samples with a mean KL of ``kl`` nats."""
        from flowmill.tasks.advantages.tokens import adapted_kl_coef

        assert self.target_kl is not None
        return adapted_kl_coef(kl_coef, kl, target=self.target_kl, samples=samples, horizon=self.horizon)

    def estimate(self, earned: Earned) -> Estimated:
        """Return advantages and returns of tokens."""
        raise NotImplementedError

    def _rewards(self, earned: Earned) -> Tensor:
        from flowmill.tasks.advantages.tokens import token_rewards

        return token_rewards(earned.scores, earned.mask, earned.kl, earned.kl_coef)


@dataclass(frozen=True, kw_only=True)
class GAE(TokenEstimator):
    """Generalized advantage estimation (arXiv 1506.02438) from a critic's values."""

    needs_values = True
    discount: Share = 1.0
    """gamma: how much less a later reward counts, per token."""
    decay: Share = 0.95
    """lambda: 1 trusts rewards alone, 0 the critic."""
    whiten: bool = True
    """Advantages have mean 0 and variance 1 over all tokens of the epoch."""

    def estimate(self, earned: Earned) -> Estimated:
        """Return GAE of token rewards; returns use the advantages before whitening."""
        from flowmill.tasks.advantages.tokens import gae, whitened

        assert earned.values is not None
        rewards = self._rewards(earned)
        advantages, returns = gae(rewards, earned.values, earned.mask, discount=self.discount, decay=self.decay)
        return Estimated(advantages=whitened(advantages, earned.mask) if self.whiten else advantages, returns=returns)


@dataclass(frozen=True, kw_only=True)
class Reinforce(TokenEstimator):
    """The discounted return of each token, without a baseline (REINFORCE)."""

    discount: Share = 1.0
    """gamma: how much less a later reward counts, per token."""
    whiten: bool = False
    """Advantages have mean 0 and variance 1 over all tokens of the epoch."""

    def estimate(self, earned: Earned) -> Estimated:
        """Return discounted returns, whitened if ``whiten``."""
        from flowmill.tasks.advantages.tokens import discounted_returns, whitened

        returns = discounted_returns(self._rewards(earned), earned.mask, self.discount)
        return Estimated(advantages=whitened(returns, earned.mask) if self.whiten else returns, returns=returns)


@dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlus(Reinforce):
    """REINFORCE++ (arXiv 2501.03262): returns whitened over all tokens of the epoch, no critic and no group.

    With ``baseline: group`` the group mean is subtracted from each score first.
    """

    whiten: bool = True
    """Advantages have mean 0 and variance 1 over all tokens of the epoch."""
    baseline: Literal["none", "group"] = "none"
    """Baseline that is subtracted from scores before anything else."""

    def estimate(self, earned: Earned) -> Estimated:
        """Return whitened returns."""
        from dataclasses import replace

        from flowmill.tasks.advantages.groups import Normalizer, group_advantages

        if self.baseline == "group":
            centered = group_advantages(earned.scores, earned.groups, Normalizer(std="none"))
            earned = replace(earned, scores=centered)
        return super().estimate(earned)


@dataclass(frozen=True, kw_only=True)
class LeaveOneOut(TokenEstimator):
    """RLOO (arXiv 2402.14740): a completion is one action; its baseline is the mean of the other samples of its group.

    The KL of all its tokens is part of the score, as in TRL, so the KL of the other samples is part of the baseline.
    """

    def estimate(self, earned: Earned) -> Estimated:
        """Return one advantage for all tokens of a sample."""
        from flowmill.tasks.advantages.groups import Normalizer, group_advantages

        scores = self._rewards(earned).sum(-1)
        advantages = group_advantages(scores, earned.groups, Normalizer(std="none", mean="leave_one_out"))
        spread = advantages[:, None] * earned.mask
        return Estimated(advantages=spread, returns=scores[:, None] * earned.mask)


def estimated(estimator: Group, earned: EarnedBySamples, name: str) -> Tensor:
    """Return the (N,) float64 advantages by an estimator."""
    import torch

    values = estimator.estimate(earned)
    if isinstance(values, torch.Tensor) and values.shape == earned.groups.shape and bool(values.isfinite().all()):
        return values.double()
    got = f"of shape {tuple(values.shape)}" if isinstance(values, torch.Tensor) else f"a {type(values).__name__}"
    raise ConfigError(
        f"advantage.estimator '{name}' returned {got}, but 'estimate' must return a tensor with a finite number for "
        f"each of {len(earned.groups)} samples."
    )


def make_estimator(config: RunConfig) -> Estimator:
    """Return the advantage estimator of a run."""
    estimator: Estimator = chosen(ESTIMATORS, config.advantage.estimator, label="advantage.estimator")
    return estimator
