"""The one place where algorithms exponentiate a log-ratio of two policies. Pure: tensors in, tensors out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

#: Nats above which a ratio no longer grows (verl bounds log-ratios by the same number): e^20 = 4.9e8 is far outside
#: every clip range, and its square and its gradient are finite in float32.
LARGEST_LOG_RATIO = 20.0


def policy_ratio(log_ratio: Tensor) -> Tensor:
    """Return exp(min(log rho, 20)), of any shape, with the gradient rho' = rho.

    Up to the bound all bits are those of ``exp``. Above it value and gradient are those at the bound: an unbounded
    ratio overflows float32 at 88.7, and where a clip or a mask multiplies its gradient by 0 the product is NaN. The
    gradient above the bound is not 0, so that a loss that is not clipped there still pulls the ratio back.
    """
    excess = (log_ratio.detach() - LARGEST_LOG_RATIO).clamp(min=0)
    return torch.exp(log_ratio - excess)
