"""Losses over tokens. Pure: tensors in, tensors out.

Legend: B rows, W positions; ``mask`` (B, W) bool of tokens the policy chose. Results ignore values outside the mask.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flowmill.tasks.algorithms.ratios import policy_ratio

Estimator = Literal["k1", "k2", "k3"]
Correction = Literal["clip", "mask", "mask_rows"]
Preference = Literal["sigmoid", "hinge", "ipo"]


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Return the sum over chosen tokens, (B,); uses ``where`` because NaN times 0 is NaN."""
    return torch.where(mask, values, torch.zeros_like(values)).sum(-1)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over chosen tokens, (B,); 0 for a row without chosen tokens."""
    return masked_sum(values, mask) / mask.sum(-1).clamp(min=1)


def token_kl(log_probs: Tensor, reference: Tensor, estimator: Estimator) -> Tensor:
    """Return an estimate of KL(policy || reference) per token, (B, W).

    With d = log p - log ref: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d (J. Schulman, 2020).
    """
    difference = log_probs - reference
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    return policy_ratio(-difference) - 1 + difference


def sequence_log_ratio(log_probs: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    """Return GSPO's log-ratio (arXiv 2507.18071, eq. 7), (B, W): the row's mean, with each token's own gradient.

    The value is the same for all tokens of a row. The gradient of token t is that of its log-prob, as in the
    stop-gradient form (eq. 14). With one advantage per row both forms have the same total gradient.
    """
    mean = masked_mean(log_probs.detach() - old, mask)
    return mean[:, None] + log_probs - log_probs.detach()


def product_log_ratio(log_probs: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    """Return the log-ratio of whole rows, (B, W): the sum over chosen tokens, at every token, with its full gradient.

    The mean over a row's tokens is then the row's value, and its gradient is that of log p(completion).
    """
    return masked_sum(log_probs - old, mask)[:, None].expand_as(log_probs)


def cispo_tokens(log_ratio: Tensor, advantages: Tensor, log_probs: Tensor, high: float) -> Tensor:
    """Return -sg(min(r, 1 + high)) A log p per token, (B, W): no token loses its gradient (arXiv 2506.13585).

    Args:
        log_ratio: (B, W).
        advantages: (B, W) or (B, 1).
        log_probs: (B, W) with gradient.
        high: maximum distance of a weight above 1.
    """
    return -policy_ratio(log_ratio).clamp(max=1 + high).detach() * advantages * log_probs


def sampler_weights(
    behavior: Tensor, sampled: Tensor, mask: Tensor, *, low: float, high: float, correction: Correction
) -> Tensor:
    """Return importance weights of the behavior policy over the sampler that drew the tokens, (B, W), without gradient.

    Both have the same parameters, but use different kernels: w = exp(behavior - sampled). Truncated importance sampling
    clips w (F. Yao et al., 2025). IcePop drops tokens with w out of range (Ling team, arXiv 2510.18855). The third form
    drops whole rows by the geometric mean of their w, as OpenRLHF's ``seq-mask-tis`` does.

    Args:
        behavior: (B, W) log-probs of the behavior policy, as computed by training.
        sampled: (B, W) log-probs as computed by the sampler.
        mask: see above.
        low: smallest weight.
        high: largest weight.
        correction: treatment of weights out of range.
    """
    log_weight = torch.where(mask, behavior - sampled, 0.0).detach()
    weight = policy_ratio(log_weight)
    if correction == "clip":
        return weight.clamp(low, high)
    measure = policy_ratio(masked_mean(log_weight, mask))[:, None] if correction == "mask_rows" else weight
    return torch.where((measure >= low) & (measure <= high), weight, 0.0)


def clipped_value_loss(values: Tensor, old: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """Return 0.5 max((v - R)^2, (old + clip(v - old) - R)^2) per token, (B, W) (PPO's reference code; verl, OpenRLHF).

    It takes the larger of the two. Beyond the clip range, values that moved towards R have no gradient, and values that
    moved away from R have the full gradient.

    Args:
        values: (B, W) with gradient.
        old: (B, W) values at the time of advantage estimation.
        returns: (B, W).
        clip: maximum change of values from the old ones; None: no limit.
    """
    plain = (values - returns).square()
    if clip is None:
        return plain / 2
    bounded = old + (values - old).clamp(-clip, clip)
    return torch.maximum(plain, (bounded - returns).square()) / 2


def preference_loss(margin: Tensor, beta: float, form: Preference, label_smoothing: float = 0.0) -> Tensor:
    """Return the loss of pairs, (B,), which falls as the margin grows, with 'ipo' up to 1 / (2 beta).

    'sigmoid': -log sigmoid(beta m) (DPO, arXiv 2305.18290, eq. 7); label smoothing e gives (1 - e) loss(m) + e loss(-m)
    (E. Mitchell, 2023). 'hinge': max(0, 1 - beta m) (SLiC, arXiv 2305.10425, eq. 7, relative to the base model as in
    TRL). 'ipo': (m - 1 / (2 beta))^2 (IPO, arXiv 2310.12036, eq. 17).

    Args:
        margin: (B,) log p / p_ref of the better text minus that of the worse one.
        beta: inverse temperature.
        form: the loss.
        label_smoothing: assumed share of pairs in the wrong order, with 'sigmoid'.
    """
    if form == "ipo":
        return (margin - 1 / (2 * beta)).square()
    if form == "hinge":
        return torch.relu(1 - beta * margin)
    right, wrong = (torch.nn.functional.logsigmoid(sign * beta * margin) for sign in (1, -1))
    return -(1 - label_smoothing) * right - label_smoothing * wrong
