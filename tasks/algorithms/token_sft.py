"""Supervised fine-tuning of language models: the negative log-likelihood of completions, mean over an update's tokens.

Rejected texts, and rated ones below the neutral rating, are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from flowmill.tasks.algorithms.base import Batch, Requirements, RowLoss, expect
from flowmill.tasks.algorithms.token_objectives import masked_mean, masked_sum
from flowmill.tasks.algorithms.tokens import TokenBatch, TokenModels


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSFT:
    """Next-token loss on the tokens of completions; prompts and padding do not count."""

    requires = Requirements(kind="tokens", data="forward", advantages=False, desired=True)

    def loss(self, batch: Batch, models: TokenModels) -> RowLoss:
        """Return the loss of each row."""
        rows = expect(batch, TokenBatch)
        log_probs, entropy = models.log_probs(rows)
        log_probs = rows.chosen(log_probs)
        metrics = {
            "nll": -masked_mean(log_probs.detach(), rows.mask),
            "entropy": masked_mean(entropy, rows.mask),
            "length": rows.mask.sum(-1).float(),
        }
        return RowLoss(loss=-masked_sum(log_probs, rows.mask) * rows.share, metrics=metrics)
