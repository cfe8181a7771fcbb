"""Rows of texts as the algorithms of language models get them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flowmill.tasks.algorithms.tokens import TokenBatch


def token_batch(mask: Tensor, log_probs: Tensor, **changes: Any) -> TokenBatch:
    """Return texts of tokens 0 whose log-probs (B, T) are the same before, in rollout and of the behavior policy."""
    rows, dtype = len(mask), log_probs.dtype
    own: dict[str, Any] = {
        "ids": torch.zeros(mask.shape, dtype=torch.int64),
        **dict.fromkeys(("old_log_probs", "behavior_log_probs", "sampled_log_probs"), log_probs),
        **{name: torch.ones(rows, dtype=dtype) for name in ("share", "advantages", "weights", "importance")},
        "own": torch.zeros(rows, dtype=torch.bool),
        "units": torch.arange(rows),
        "count": rows,
        **{name: torch.zeros(rows, dtype=torch.int64) for name in ("age", "step")},
        "keys": tuple((row, 0) for row in range(rows)),
    }
    return TokenBatch(mask=mask, **{**own, **changes})
