"""KTO for language models (arXiv 2402.01306) on single texts that are desired or not.

The gain of a text is beta times the log-ratio of policy and base model. The reference point is 0, as in APO-zero (arXiv
2408.06266), so that the loss of a row does not depend on its batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import PositiveFloat

from tasks.algorithms.base import Batch, Requirements, RowLoss, expect
from tasks.algorithms.objectives import kto_loss
from tasks.algorithms.token_objectives import masked_mean, masked_sum
from tasks.algorithms.tokens import TokenBatch, TokenModels


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenKTO:
    """Needs no pairs: a rating of each text is enough."""

    beta: PositiveFloat = 0.1
    """Inverse temperature, the cost of leaving the base model."""
    desired_weight: PositiveFloat = 1.0
    """Weight of desired texts; raise it where they are few."""
    undesired_weight: PositiveFloat = 1.0
    """Weight of undesired texts."""

    @property
    def requires(self) -> Requirements:
        """Requires single texts and the base model."""
        return Requirements(kind="tokens", data="forward", reference=True)

    def loss(self, batch: Batch, models: TokenModels) -> RowLoss:
        """Return the loss of each row."""
        rows = expect(batch, TokenBatch)
        log_probs, entropy = models.log_probs(rows)
        log_probs, reference = rows.chosen(log_probs), rows.chosen(models.reference_log_probs(rows))
        gain = self.beta * masked_sum(log_probs - reference, rows.mask)
        metrics = {
            "gain": gain.detach(),
            "preferred": (gain.detach() * rows.advantages > 0).float(),
            "entropy": masked_mean(entropy, rows.mask),
            "length": rows.mask.sum(-1).float(),
        }
        loss = kto_loss(gain, rows.advantages, self.desired_weight, self.undesired_weight)
        return RowLoss(loss=loss, metrics=metrics)
