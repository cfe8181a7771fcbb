"""DPO for language models (arXiv 2305.18290) on a group's best and worst text.

The margin is the log-ratio of policy and base model for the better text minus that for the worse one; the loss falls
as it grows. Two texts of equal advantage form no pair: such a group is left out.

The algorithm is offline: it can use stored texts of any age, because the loss does not use the policy that wrote them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveFloat

from flowmill.tasks.algorithms.base import Batch, Requirements, RowLoss, expect
from flowmill.tasks.algorithms.objectives import pair_sign, unit_sum
from flowmill.tasks.algorithms.token_objectives import Preference, masked_mean, masked_sum, preference_loss
from flowmill.tasks.algorithms.tokens import TokenBatch, TokenModels


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDPO:
    """The published objective; variants are its options."""

    beta: PositiveFloat = 0.1
    """Inverse temperature, the cost of leaving the base model. With 'ipo' the target margin is 1 / (2 beta)."""
    form: Preference = "sigmoid"
    """Of a margin m: -log sigmoid(beta m); max(0, 1 - beta m) (SLiC, arXiv 2305.10425); (m - 1 / (2 beta))^2 (IPO,
    arXiv 2310.12036)."""
    length_normalized: bool = False
    """Log-probs of a text are means over its tokens instead of sums, so that long texts do not count more."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Assumed share of pairs in the wrong order, with 'sigmoid' (conservative DPO)."""
    likelihood: NonNegativeFloat = 0.0
    """Weight of -log p of the better text, mean over its tokens; keeps the text likely (RPO, arXiv 2404.19733)."""

    def __post_init__(self) -> None:
        if self.label_smoothing and self.form != "sigmoid":
            raise ValueError(f"label_smoothing belongs to form 'sigmoid', and that is {self.form!r}.")

    @property
    def requires(self) -> Requirements:
        """Requires pairs and the base model."""
        return Requirements(kind="tokens", data="forward", unit="pair", min_group_size=2, reference=True)

    def loss(self, batch: Batch, models: TokenModels) -> RowLoss:
        """Return each pair's loss on both of its rows, so the mean over rows equals the mean over pairs."""
        rows = expect(batch, TokenBatch)
        log_probs, entropy = models.log_probs(rows)
        log_probs, reference = rows.chosen(log_probs), rows.chosen(models.reference_log_probs(rows))
        of_row = masked_mean if self.length_normalized else masked_sum
        gained = of_row(log_probs - reference, rows.mask)
        sign = pair_sign(rows.advantages, rows.units)
        margin = unit_sum(sign * gained * rows.weights, rows.units)
        loss = preference_loss(margin, self.beta, self.form, self.label_smoothing)
        better = (sign > 0).float()
        if self.likelihood:
            likely = unit_sum(better * masked_mean(log_probs, rows.mask) * rows.weights, rows.units)
            loss = loss - self.likelihood * likely
        gains = gained.detach()
        metrics = {
            "preferred": (margin > 0).float().detach(),
            "margin": margin.detach(),
            # Figures of pairs, on both rows.
            "better_gain": unit_sum(better * gains * rows.weights, rows.units),
            "worse_gain": unit_sum((1 - better) * gains * rows.weights, rows.units),
            "entropy": masked_mean(entropy, rows.mask),
            "length": rows.mask.sum(-1).float(),
        }
        return RowLoss(loss=loss * sign.abs(), metrics=metrics)
