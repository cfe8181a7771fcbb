"""Rows of causal language models, and the calls to such a policy that an algorithm can make.

Legend: B rows of a micro-batch, W positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flowmill.tasks.algorithms.base import Batch, Models

if TYPE_CHECKING:
    from flowmill.models.maths.row_tails import UsedOutputs
    from flowmill.models.policies.causal_lm import TrainableLM
    from flowmill.models.policies.critic_lm import TrainableCritic


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch(Batch):
    """Texts: prompt and completion of each row, padded on the right."""

    weighed = True

    ids: Tensor
    """(B, W) int64."""
    mask: Tensor
    """(B, W) bool: tokens the policy chose; there may be gaps."""
    old_log_probs: Tensor
    """(B, W) float32 log-probs of the behavior policy, 0 elsewhere; of the policy before the epoch for rows of an older
    one, whose importance weight leads from that to this."""
    behavior_log_probs: Tensor
    """(B, W) float32 log-probs of the behavior policy as training computed them, 0 elsewhere."""
    sampled_log_probs: Tensor
    """(B, W) float32 log-probs as the sampler computed them, 0 elsewhere."""
    share: Tensor
    """(B,) float32: rows of the update divided by its tokens that the policy chose."""
    own: Tensor
    """(B,) bool: old log-probs are those of the current policy."""
    token_advantages: Tensor | None = None
    """(B, W) float32 if every token has its own advantage; 0 outside the mask."""
    returns: Tensor | None = None
    """(B, W) float32 targets of the critic, if advantages are per token."""
    values: Tensor | None = None
    """(B, W) float32 values of the critic at the time of advantage estimation, if there is one."""
    reference: Tensor | None = None
    """(B, W) float32 log-probs of the base model, if stored."""
    used: UsedOutputs = None
    """The outputs whose logits are used: of rows packed by prompt (``optimize.shared_prompts``), or of tails."""

    @property
    def by_token(self) -> Tensor:
        """The (B, W) advantages of tokens, or one per row, (B, 1)."""
        return self.advantages[:, None] if self.token_advantages is None else self.token_advantages

    def chosen(self, values: Tensor) -> Tensor:
        """Return (B, W) values with 0, and no gradient, outside the mask."""
        return torch.where(self.mask, values, torch.zeros_like(values))

    def anchored(self, log_probs: Tensor) -> Tensor:
        """Return the (B, W) old log-probs, replaced by the policy's current ones in rows with ``own``."""
        return torch.where(self.own[:, None], log_probs.detach(), self.old_log_probs)


@dataclass(slots=True, kw_only=True)
class TokenModels(Models):
    """Log-probs of the policy and of the models it is compared with."""

    trainable: TrainableLM
    """The policy being trained."""
    temperature: float
    """Divides logits, as in the rollout."""
    critic: TrainableCritic | None = None
    """The critic, where one is trained."""

    def log_probs(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """Return the policy's (B, W) log-probs, with gradient, and entropies."""
        return self.trainable.log_probs(batch.ids, self.temperature, batch.used)

    def log_probs_and_values(self, batch: TokenBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``log_probs`` and the critic's (B, W) values with gradient; no gradient connects the two.

        While the policy is frozen, its log-probs have no gradient.
        """
        critic = self.critic
        assert critic is not None
        ids, hidden = batch.ids, None
        with torch.set_grad_enabled(not self.frozen):
            if critic.reads_policy:
                log_probs, entropy, hidden = self.trainable.log_probs_and_hidden(ids, self.temperature, batch.used)
            else:
                log_probs, entropy = self.log_probs(batch)
        sampled = batch.sampled_log_probs if critic.reads_log_probs else None
        return log_probs, entropy, critic.values(ids, hidden, batch.used, sampled)

    def reference_log_probs(self, batch: TokenBatch) -> Tensor:
        """Return the base model's (B, W) log-probs, stored or computed once per row and epoch."""
        if batch.reference is not None:
            return batch.reference
        if self.base is not None:
            with torch.no_grad(), self.trainable.holding(self.base()):
                return self.log_probs(batch)[0]
        cache = self.remembered
        if cache is not None and all(key in cache for key in batch.keys):
            rows = [cache[key][: batch.ids.shape[1]] for key in batch.keys]
            return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(batch.ids.device)
        log_probs = self.trainable.reference_log_probs(batch.ids, self.temperature, batch.used)
        if cache is not None:
            cache.update(zip(batch.keys, log_probs.cpu(), strict=True))
        return log_probs

    def recall(self, batch: TokenBatch) -> None:
        """Cache the rows' log-probs of the base model."""
        self.reference_log_probs(batch)
