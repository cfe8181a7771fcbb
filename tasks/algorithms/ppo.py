"""PPO for language models (arXiv 1707.06347, 2203.02155): a clipped policy, and a critic with clipped values beside it.

Advantages and returns of every token are estimated from the critic's values and from rewards less the KL to the base
model (``advantage.estimator: gae``). Policy and critic share no trained parameter; each has an optimizer of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from tasks.algorithms.base import Batch, Requirements, RowLoss, expect
from tasks.algorithms.token_grpo import TokenGRPO
from tasks.algorithms.token_objectives import clipped_value_loss, masked_mean
from tasks.algorithms.tokens import TokenBatch, TokenModels


@dataclass(frozen=True, slots=True, kw_only=True)
class PPO(TokenGRPO):
    """The published objective, with a critic that learns."""

    normalization: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    value_clip: float | None = 0.2
    """How far values may move from those that advantages were estimated with; None: as far as they will."""

    def __post_init__(self) -> None:
        """Check the options."""
        TokenGRPO.__post_init__(self)
        if self.value_clip is not None and self.value_clip <= 0:
            raise ValueError(f"value_clip is {self.value_clip}; it must be above 0, or null.")

    @property
    def requires(self) -> Requirements:
        """A critic; every sample, as it learns from those of advantage 0 too."""
        base = super(PPO, self).requires
        return replace(base, min_group_size=1, critic=True, zero_advantages=True)

    def loss(self, batch: Batch, models: TokenModels) -> RowLoss:
        """Return the policy's loss of every row, 0 while it is held, and the critic's beside it."""
        rows = expect(batch, TokenBatch)
        assert rows.values is not None
        assert rows.returns is not None
        log_probs, entropy, values = models.log_probs_and_values(rows)
        values = rows.chosen(values)
        found = self.of_log_probs(rows, models, log_probs, entropy)
        tokens = clipped_value_loss(values, rows.values, rows.returns, self.value_clip)
        metrics = dict(found.metrics)
        metrics["value"] = masked_mean(values.detach(), rows.mask)
        if self.value_clip is not None:
            moved = ((values - rows.values).abs() > self.value_clip).float()
            metrics["value_clip"] = masked_mean(moved, rows.mask)
        loss = torch.zeros_like(found.loss) if models.held else found.loss
        return replace(found, loss=loss, beside={"critic": self._row(tokens, rows)}, metrics=metrics)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReinforcePP(TokenGRPO):
    """REINFORCE++ (arXiv 2501.03262): PPO's clipped ratio without a critic, on advantages of its own estimator."""

    normalization: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"

    @property
    def requires(self) -> Requirements:
        """Advantages of tokens, of groups of any size."""
        return replace(super(ReinforcePP, self).requires, min_group_size=1, per_token=True)
