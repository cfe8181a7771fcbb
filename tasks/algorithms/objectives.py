"""Loss terms shared by algorithms. Pure: tensors in, tensors out; (B,) unless said."""

from __future__ import annotations

import torch
from torch import Tensor

from models.transitions import Gaussian, gaussian_kl


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip_range: float) -> Tensor:
    """Return max(-A rho, -A clip(rho, 1 - c, 1 + c)), the PPO loss (arXiv 1707.06347, eq. 7), negated to minimize."""
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_range, 1 + clip_range))


def ratio_metrics(ratio: Tensor, log_ratio: Tensor, clip_range: float) -> dict[str, Tensor]:
    """Return row metrics of a policy ratio: its value and square, clipped high and low, and the k3 KL estimate.

    k3 = rho - 1 - log rho is an unbiased, non-negative estimate of KL(old || new) for samples of the old policy.
    """
    return {
        "ratio": ratio,
        "ratio_squared": ratio**2,
        "clip_high": (ratio > 1 + clip_range).float(),
        "clip_low": (ratio < 1 - clip_range).float(),
        "approx_kl": ratio - 1 - log_ratio,
    }


def policy_kl(
    kind: str, new: Gaussian, reference: Gaussian, velocities: tuple[Tensor, Tensor], scale: Tensor
) -> Tensor:
    """Return a KL to the reference at the same states.

    Args:
        kind: 'gaussian', the true KL, mean (mu - mu')^2 / (2 s^2 |dt|) (also Flow-GRPO's Wan script);
            'flow_grpo', its image scripts' mean (mu - mu')^2 / (2 s^2), which leaves |dt| out;
            'velocity', mean (v - v')^2 (Flow-Factory's 'v-based').
        new: step of the policy.
        reference: step of the reference from the same latents.
        velocities: (B, ...) of policy and reference.
        scale: |dt|.
    """
    if kind == "velocity":
        return ((velocities[0] - velocities[1]) ** 2).flatten(1).mean(1)
    true = gaussian_kl(new, reference)
    return true * scale if kind == "flow_grpo" else true
