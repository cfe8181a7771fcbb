"""GRPO for language models (DeepSeekMath, arXiv 2402.03300): the clipped ratio of every token, with group advantages.

All tokens of a completion have its advantage. ``normalization`` selects the divisor of a row's token sum: all tokens of
the update (DAPO, arXiv 2503.14476), the row's own tokens (the paper), or a constant (Dr.GRPO, arXiv 2503.20783). Shares
are computed from the masks of the whole update, so micro-batches, ranks and padding change no loss. One update per
epoch is the on-policy case: every ratio is exactly 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor

from flowmill.configs.option_types import OpenShare
from flowmill.tasks.algorithms.base import LARGEST, Batch, Requirements, RowLoss, expect
from flowmill.tasks.algorithms.objectives import ratio_metrics, ratio_surrogate
from flowmill.tasks.algorithms.ratios import RatioClip, k3_estimate, policy_ratio
from flowmill.tasks.algorithms.token_objectives import (
    Correction,
    Estimator,
    cispo_tokens,
    masked_mean,
    masked_sum,
    product_log_ratio,
    sampler_weights,
    sequence_log_ratio,
    token_kl,
)
from flowmill.tasks.algorithms.tokens import TokenBatch, TokenModels

#: Logged estimates of the KL to the base model.
_KLS: tuple[Estimator, ...] = ("k1", "k3")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenGRPO(RatioClip):
    """The published objective; variants are its options."""

    normalization: Literal["token_mean", "sequence_mean", "constant"] = "sequence_mean"
    """Mean over all tokens of the update, over each row's tokens, or row sums divided by ``constant``."""
    constant: PositiveInt | None = None
    """Divisor of row sums with normalization 'constant', for example the longest completion."""
    ratio: Literal["token", "sequence", "product"] = "token"
    """One ratio per token, or per row: the geometric mean (GSPO) or the product (RLOO) of its tokens' ratios."""
    surrogate: Literal["clip", "cispo", "spo"] = "clip"
    """PPO's clipped surrogate, CISPO's clipped weights, or SPO's pull back to the clip range."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the KL to the base model, in the loss."""
    kl: Estimator = "k3"
    """Estimator of that KL per token."""
    kl_after: bool = False
    """Also report the KL to the base model after each update, on its first micro-batch; takes one more forward."""
    tis: float | None = None
    """Largest weight exp(old - sampled) that corrects for the rounding of another engine; none: no correction."""
    tis_low: float = 0.0
    """Smallest such weight."""
    tis_outside: Correction = "clip"
    """Weights out of range are clipped (TIS), or set to 0 per token (mask: IcePop) or per row by mean (mask_rows)."""

    def __post_init__(self) -> None:
        if (self.normalization == "constant") != (self.constant is not None):
            raise ValueError("constant belongs to normalization 'constant', which needs it.")
        if self.tis is not None and not 0 <= self.tis_low <= 1 <= self.tis:
            raise ValueError(
                f"tis is {self.tis} and tis_low {self.tis_low}; a weight of 1 must lie between tis_low and tis."
            )

    def switched_off(self) -> str | None:
        """Return why details of importance weights do nothing, if so."""
        idle = self.tis is None and (self.tis_low, self.tis_outside) != (0.0, "clip")
        return "tis_low and tis_outside belong to tis, which is not set" if idle else None

    @property
    def kl_limit(self) -> float:
        """Nats per token, whatever the ratio is of: one epoch should move the policy by much less."""
        return 1.0

    @property
    def kl_base_limit(self) -> float:
        """Nats per token: what the policy writes is then nearly impossible for the base model."""
        return 2.0

    @property
    def requires(self) -> Requirements:
        """Requires groups of two; a KL also the base model and samples of advantage 0."""
        with_kl = self.kl_coef > 0
        return Requirements(
            kind="tokens",
            min_group_size=2,
            reference=with_kl or self.kl_after,
            zero_advantages=with_kl,
            after=self.kl_after,
            approx_kl=True,
        )

    def loss(self, batch: Batch, models: TokenModels) -> RowLoss:
        """Return the loss of each row, with tokens weighted according to ``normalization``."""
        rows = expect(batch, TokenBatch)
        return self.of_log_probs(rows, models, *models.log_probs(rows))

    def of_log_probs(self, rows: TokenBatch, models: TokenModels, log_probs: Tensor, entropy: Tensor) -> RowLoss:
        """Return the loss of each row from its (B, W) log-probs and entropies."""
        log_probs = rows.chosen(log_probs)
        old = rows.chosen(rows.anchored(log_probs))
        log_ratio = self._log_ratio(log_probs, old, rows.mask)
        advantages = rows.by_token
        if self.surrogate == "cispo":
            tokens = cispo_tokens(log_ratio, advantages, log_probs, self.clip[1])
        else:
            tokens = ratio_surrogate(self.surrogate, log_ratio, advantages, self.clip)
        metrics = self._metrics(rows, log_probs.detach(), log_ratio.detach(), entropy)
        if models.measures:
            metrics["kl_base"] = self._kl_base(rows, models, log_probs)
        if self.tis is not None:
            weights = sampler_weights(
                rows.behavior_log_probs,
                rows.sampled_log_probs,
                rows.mask,
                low=self.tis_low,
                high=self.tis,
                correction=self.tis_outside,
            )
            metrics["tis"] = masked_mean(weights, rows.mask)
            tokens = tokens * weights
        if rows.reference is not None:
            for name in _KLS:
                before = token_kl(log_probs.detach(), rows.reference, name)
                metrics[f"kl_before_{name}"] = masked_mean(before, rows.mask)
        if self.kl_coef > 0:
            kl = token_kl(log_probs, rows.chosen(models.reference_log_probs(rows)), self.kl)
            metrics["kl"] = masked_mean(kl.detach(), rows.mask)
            tokens = tokens + self.kl_coef * kl
        return RowLoss(loss=self._row(tokens, rows), metrics=metrics)

    def after(self, batch: Batch, models: TokenModels) -> dict[str, Tensor]:
        """Return the KL to the base model of each row, as the mean over its tokens."""
        rows = expect(batch, TokenBatch)
        log_probs, reference = models.log_probs(rows)[0], models.reference_log_probs(rows)
        return {f"kl_after_{name}": masked_mean(token_kl(log_probs, reference, name), rows.mask) for name in _KLS}

    def _kl_base(self, rows: TokenBatch, models: TokenModels, log_probs: Tensor) -> Tensor:
        """Return the KL of the policy to the base model per token of samples of the behavior policy, (B,)."""
        reference, old = rows.chosen(models.reference_log_probs(rows)), rows.chosen(rows.old_log_probs)
        weighted = policy_ratio(log_probs - old) * token_kl(log_probs, reference, "k3")
        return masked_mean(weighted, rows.mask)

    def _log_ratio(self, log_probs: Tensor, old: Tensor, mask: Tensor) -> Tensor:
        if self.ratio == "sequence":
            return sequence_log_ratio(log_probs, old, mask)
        return product_log_ratio(log_probs, old, mask) if self.ratio == "product" else log_probs - old

    def _row(self, tokens: Tensor, rows: TokenBatch) -> Tensor:
        if self.normalization == "token_mean":
            return masked_sum(tokens, rows.mask) * rows.share
        if self.normalization == "sequence_mean":
            return masked_mean(tokens, rows.mask)
        assert self.constant is not None
        return masked_sum(tokens, rows.mask) / float(self.constant)

    def _metrics(self, rows: TokenBatch, log_probs: Tensor, log_ratio: Tensor, entropy: Tensor) -> dict[str, Tensor]:
        mask = rows.mask
        ratios = ratio_metrics(log_ratio, self.clip) | {"approx_kl": k3_estimate(-log_ratio)}
        # Per token, whatever the ratio is of; unlike approx_kl it grows only linearly where a token gets unlikely.
        moved = log_probs - rows.chosen(rows.anchored(log_probs))
        ratios["kl_epoch"] = k3_estimate(moved)
        gap = torch.where(mask, (log_probs - rows.old_log_probs).abs(), 0.0).amax(-1)
        sampler = torch.where(mask, (rows.sampled_log_probs - rows.behavior_log_probs).abs(), 0.0).amax(-1)
        return {
            **{name: masked_mean(values, mask) for name, values in ratios.items()},
            "entropy": masked_mean(entropy, mask),
            "length": mask.sum(-1).float(),
            f"{LARGEST}sampler_gap": sampler,
            "gap": gap,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class DAPO(TokenGRPO):
    """GRPO with a higher upper bound and the mean over all tokens of the update (arXiv 2503.14476)."""

    clip_high: PositiveFloat | None = 0.28
    normalization: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"


@dataclass(frozen=True, slots=True, kw_only=True)
class GSPO(TokenGRPO):
    """GRPO with one ratio per row, the geometric mean of its tokens' ratios (arXiv 2507.18071)."""

    clip_range: OpenShare = 3e-4
    clip_high: PositiveFloat | None = 4e-4
    ratio: Literal["token", "sequence", "product"] = "sequence"


@dataclass(frozen=True, slots=True, kw_only=True)
class CISPO(TokenGRPO):
    """GRPO with clipped weights instead of a clipped surrogate (arXiv 2506.13585)."""

    normalization: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    surrogate: Literal["clip", "cispo", "spo"] = "cispo"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrGRPO(TokenGRPO):
    """GRPO without the bias to long wrong answers and easy prompts (arXiv 2503.20783): no std, sums over a constant."""

    normalization: Annotated[Literal["constant"], "grpo has a choice of it."] = "constant"

    @property
    def requires(self) -> Requirements:
        """Those of GRPO, with advantages that only subtract the group mean."""
        # slots=True creates a new class, so super() without arguments would refer to the old one.
        return replace(super(DrGRPO, self).requires, normalization=(("std", "none"), ("mean", "group")))


@dataclass(frozen=True, slots=True, kw_only=True)
class RLOO(TokenGRPO):
    """REINFORCE with the mean of the group's other samples as baseline (arXiv 2402.14740): a completion is one action.

    Its ratio is the product of its tokens' ratios, clipped as in TRL if an epoch has several updates. With one update
    the gradient is that of -A log p(completion).
    """

    ratio: Annotated[Literal["product"], "grpo has a choice of it."] = "product"
    normalization: Annotated[Literal["sequence_mean"], "grpo has a choice of it."] = "sequence_mean"
    surrogate: Annotated[Literal["clip"], "grpo has a choice of it."] = "clip"

    @property
    def requires(self) -> Requirements:
        """Those of GRPO, with advantages that subtract the leave-one-out mean."""
        # slots=True creates a new class, so super() without arguments would refer to the old one.
        return replace(super(RLOO, self).requires, normalization=(("std", "none"), ("mean", "leave_one_out")))
