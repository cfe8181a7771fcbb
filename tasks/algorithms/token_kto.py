"""KTO for language models (arXiv 2402.01306, eq. 7) on single texts that are desired or not.

The gain of a text is beta times the log-ratio of policy and base model. The reference point is the mean gain of an
update's texts after the prompts of others, at least 0, an estimate of the KL from the base model; it has no gradient.
TRL takes that mean over a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pydantic import PositiveFloat

from flowmill.tasks.algorithms.base import Batch, Requirements, RowLoss, expect
from flowmill.tasks.algorithms.objectives import kto_loss
from flowmill.tasks.algorithms.token_objectives import masked_mean, masked_sum
from flowmill.tasks.algorithms.tokens import TokenBatch, TokenModels

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenKTO:
    """Needs no pairs: a rating of each text is enough."""

    mismatched: ClassVar[bool] = True
    """The reference point is estimated; it is 0 otherwise."""

    beta: PositiveFloat = 0.1
    """Inverse temperature, the cost of leaving the base model."""
    desired_weight: PositiveFloat = 1.0
    """Weight of desired texts; raise it where they are few."""
    undesired_weight: PositiveFloat = 1.0
    """Weight of undesired texts."""

    @property
    def requires(self) -> Requirements:
        """Requires single texts, the base model, and texts after other prompts for the reference point."""
        return Requirements(kind="tokens", data="forward", reference=True, mismatched=self.mismatched)

    def gain(self, rows: TokenBatch, models: TokenModels, log_probs: Tensor) -> Tensor:
        """Return the gain of each text, (B,), from the policy's log-probs."""
        log_probs, reference = rows.chosen(log_probs), rows.chosen(models.reference_log_probs(rows))
        return self.beta * masked_sum(log_probs - reference, rows.mask)

    def mismatched_gain(self, batch: Batch, models: TokenModels) -> Tensor:
        """Return the gain of each text after another text's prompt, (B,)."""
        rows = expect(batch, TokenBatch)
        return self.gain(rows, models, models.log_probs(rows)[0])

    def loss(self, batch: Batch, models: TokenModels) -> RowLoss:
        """Return the loss of each row."""
        rows = expect(batch, TokenBatch)
        log_probs, entropy = models.log_probs(rows)
        gain = self.gain(rows, models, log_probs)
        metrics = {
            "gain": gain.detach(),
            "preferred": (gain.detach() * rows.advantages > 0).float(),
            "entropy": masked_mean(entropy, rows.mask),
            "length": rows.mask.sum(-1).float(),
        }
        weights = (self.desired_weight, self.undesired_weight)
        return RowLoss(loss=kto_loss(gain, rows.advantages, *weights, point=models.reference_point), metrics=metrics)
