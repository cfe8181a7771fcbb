"""The policy ratio, the only exponential of a log-ratio in algorithms, and the options of its clip range."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pydantic import PositiveFloat
from torch import Tensor

from flowmill.configs.option_types import OpenShare

#: Log-ratio in nats above which the ratio is constant (verl has the same bound): e^20 = 4.9e8 is far outside every
#: clip range, and its square and gradient are finite in float32.
LARGEST_LOG_RATIO = 20.0


# Without slots, because a class can have only one base with slots, and the KL of diffusion algorithms is another base.
@dataclass(frozen=True, kw_only=True)
class RatioClip:
    """The clip range of policy ratios, with the same options in every algorithm that has one."""

    clip_range: OpenShare = 0.2
    """Ratios are clipped to 1 +- clip_range."""
    clip_low: OpenShare | None = None
    """Ratios below 1 - clip_low are clipped; clip_range when absent."""
    clip_high: PositiveFloat | None = None
    """Ratios above 1 + clip_high are clipped; clip_range when absent."""

    @property
    def clip(self) -> tuple[float, float]:
        """The distances of the lower and of the upper bound from 1."""
        low, high = self.clip_low, self.clip_high
        return self.clip_range if low is None else low, self.clip_range if high is None else high

    @property
    def kl_limit(self) -> float:
        """The ``approx_kl`` of log-ratios ten times the clip range; an epoch that moves so far is a fault."""
        return (10 * max(self.clip)) ** 2 / 2


def policy_ratio(log_ratio: Tensor) -> Tensor:
    """Return exp(min(log rho, 20)), of any shape, with the gradient rho' = rho.

    Up to the bound the result equals ``exp`` bit for bit. Above it value and gradient are those at the bound, because
    an unbounded ratio overflows float32 at 88.7, and a clip or mask that multiplies its gradient by 0 gives NaN. The
    gradient above the bound is not 0, so an unclipped loss still pulls the ratio back.
    """
    excess = (log_ratio.detach() - LARGEST_LOG_RATIO).clamp(min=0)
    return torch.exp(log_ratio - excess)
