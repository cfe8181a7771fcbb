"""The policy ratio, the only exponentials of log-ratios in algorithms, and the options of its clip range."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pydantic import PositiveFloat
from torch import Tensor

from flowmill.configs.option_types import OpenShare
from flowmill.models.devices import widened

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


def ratio_change(log_ratio: Tensor) -> Tensor:
    """Return rho - 1 of the bounded ratio, of any shape, in float64 if the device supports it, for metrics.

    With the published clip ranges of 1e-5 and 2e-6 float32 rounds most of rho - 1 away, and all of its square.
    """
    return torch.expm1(widened(log_ratio).clamp(max=LARGEST_LOG_RATIO))


def k3_estimate(log_ratio: Tensor) -> Tensor:
    """Return rho - 1 - log rho, of any shape and precise as ``ratio_change`` is, for metrics.

    It is an unbiased, non-negative estimate of KL(p || q) for rho = q / p of samples of p (J. Schulman, 2020).
    """
    return ratio_change(log_ratio) - widened(log_ratio)
