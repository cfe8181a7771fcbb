"""PPO for language models (arXiv 1707.06347, 2203.02155): a clipped policy loss, and a critic with clipped values.

Advantages and returns of each token are estimated from the critic's values and from rewards minus the KL to the base
model (``advantage.estimator: gae``). Policy and critic share no trained parameters; each has its own optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from pydantic import PositiveFloat

from flowmill.tasks.algorithms.base import Batch, Requirements, RowLoss, expect
from flowmill.tasks.algorithms.token_grpo import TokenGRPO
from flowmill.tasks.algorithms.token_objectives import clipped_value_loss, masked_mean
from flowmill.tasks.algorithms.tokens import TokenBatch, TokenModels


@dataclass(frozen=True, slots=True, kw_only=True)
class PPO(TokenGRPO):
    """The published objective, with a trained critic."""

    normalization: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    value_clip: PositiveFloat | None = 0.2
    """Maximum change of values from those used for the advantages; None: no limit."""

    @property
    def requires(self) -> Requirements:
        """Requires a critic and all samples, because the critic also learns from those of advantage 0."""
        base = super(PPO, self).requires
        return replace(base, min_group_size=1, critic=True, zero_advantages=True)

    def loss(self, batch: Batch, models: TokenModels) -> RowLoss:
        """Return the policy's loss of each row, 0 while the policy is frozen, and the critic's loss."""
        rows = expect(batch, TokenBatch)
        assert rows.values is not None
        assert rows.returns is not None
        log_probs, entropy, values = models.log_probs_and_values(rows)
        values = rows.chosen(values)
        policy_loss = self.of_log_probs(rows, models, log_probs, entropy)
        tokens = clipped_value_loss(values, rows.values, rows.returns, self.value_clip)
        metrics = dict(policy_loss.metrics)
        metrics["value"] = masked_mean(values.detach(), rows.mask)
        if self.value_clip is not None:
            moved = ((values - rows.values).abs() > self.value_clip).float()
            metrics["value_clip"] = masked_mean(moved, rows.mask)
        loss = torch.zeros_like(policy_loss.loss) if models.frozen else policy_loss.loss
        return replace(policy_loss, loss=loss, other_losses={"critic": self._row(tokens, rows)}, metrics=metrics)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReinforcePP(TokenGRPO):
    """REINFORCE++ (arXiv 2501.03262): PPO's clipped ratio without a critic, with its own advantage estimator."""

    normalization: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"

    @property
    def requires(self) -> Requirements:
        """Requires advantages of tokens; groups may have any size."""
        return replace(super(ReinforcePP, self).requires, min_group_size=1, per_token=True)
