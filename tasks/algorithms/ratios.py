"""The policy ratio, the only exponential of a log-ratio in algorithms. Pure: tensors in, tensors out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

#: Log-ratio in nats above which the ratio is constant (verl has the same bound): e^20 = 4.9e8 is far outside every
#: clip range, and its square and gradient are finite in float32.
LARGEST_LOG_RATIO = 20.0


def policy_ratio(log_ratio: Tensor) -> Tensor:
    """Return exp(min(log rho, 20)), of any shape, with the gradient rho' = rho.

    Up to the bound the result equals ``exp`` bit for bit. Above it value and gradient are those at the bound, because
    an unbounded ratio overflows float32 at 88.7, and a clip or mask that multiplies its gradient by 0 gives NaN. The
    gradient above the bound is not 0, so an unclipped loss still pulls the ratio back.
    """
    excess = (log_ratio.detach() - LARGEST_LOG_RATIO).clamp(min=0)
    return torch.exp(log_ratio - excess)
