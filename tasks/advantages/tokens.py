"""Advantages of single tokens: rewards, GAE, returns, whitening. Pure: tensors in, tensors out, float64 inside.

Legend: N samples, T tokens; ``mask`` (N, T) bool of tokens the policy chose, with gaps for other tokens (such as tool
outputs). Results are 0 outside the mask, and inputs there are ignored.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Added to a variance before its root, as TRL and verl do.
_SMALL = 1e-8


def token_rewards(scores: Tensor, mask: Tensor, kl: Tensor | None, kl_coef: float) -> Tensor:
    """Return the reward of every token, (N, T): -kl_coef times its KL, and the score on the last token (InstructGPT).

    Args:
        scores: (N,).
        mask: (N, T); rows without any token have no reward.
        kl: (N, T) estimates of the KL to the reference, or None.
        kl_coef: its weight.
    """
    places = torch.arange(mask.shape[1])
    last = torch.where(mask, places, -1).amax(-1)
    rewards = torch.where(places == last[:, None], scores.double()[:, None], 0.0)
    return rewards if kl is None else rewards - torch.where(mask, kl_coef * kl.double(), 0.0)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, discount: float, decay: float) -> tuple[Tensor, Tensor]:
    """Return advantages and returns, (N, T) each (GAE, arXiv 1506.02438, eq. 16; verl's ``compute_gae``).

    From the last token back: delta = r + discount V_next - V, A = delta + discount decay A_next, return = A + V.
    'Next' is the next chosen token, so gaps add no decay. After the last token V_next and A_next are 0.

    Args:
        rewards: (N, T).
        values: (N, T) of the state each token was chosen in.
        mask: (N, T).
        discount: gamma.
        decay: lambda.
    """
    rewards, values = rewards.double(), values.double()
    advantages = torch.zeros_like(rewards)
    following = ahead = rewards.new_zeros(len(rewards))
    for place in range(rewards.shape[1] - 1, -1, -1):
        chosen, value = mask[:, place], values[:, place]
        advantage = rewards[:, place] + discount * following - value + discount * decay * ahead
        ahead = torch.where(chosen, advantage, ahead)
        following = torch.where(chosen, value, following)
        advantages[:, place] = torch.where(chosen, advantage, 0.0)
    return advantages, torch.where(mask, advantages + values, 0.0)


def discounted_returns(rewards: Tensor, mask: Tensor, discount: float) -> Tensor:
    """Return R = r + discount R_next, (N, T), with 'next' as in ``gae`` (REINFORCE++, arXiv 2501.03262)."""
    rewards = rewards.double()
    returns = torch.zeros_like(rewards)
    ahead = rewards.new_zeros(len(rewards))
    for place in range(rewards.shape[1] - 1, -1, -1):
        step = rewards[:, place] + discount * ahead
        ahead = torch.where(mask[:, place], step, ahead)
        returns[:, place] = torch.where(mask[:, place], step, 0.0)
    return returns


def whitened(values: Tensor, mask: Tensor, *, shift_mean: bool = True) -> Tensor:
    """Return (x - mean) / sqrt(var + 1e-8) over all chosen tokens, (N, T); 0 for a single token.

    The variance is unbiased, as in ``masked_whiten`` of TRL and of verl.

    Args:
        values: (N, T).
        mask: (N, T).
        shift_mean: if False, the mean is added back.
    """
    chosen = values.double()[mask]
    mean = chosen.mean() if len(chosen) else chosen.sum()
    variance = chosen.var() if len(chosen) > 1 else chosen.new_zeros(())
    white = (values.double() - mean) * torch.rsqrt(variance + _SMALL)
    return torch.where(mask, white if shift_mean else white + mean, 0.0)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """Return 1 - Var(R - V) / Var(R) over chosen tokens: 0 for an uninformed critic, 1 for a perfect one.

    It is 0 if all returns are equal up to rounding.
    """
    targets, guessed = returns.double()[mask], values.double()[mask]
    if not len(targets) or float(targets.std(correction=0)) <= 1e-12 * float(targets.abs().max()):
        return 0.0
    return float(1 - (targets - guessed).var(correction=0) / targets.var(correction=0))


def adapted_kl_coef(kl_coef: float, kl: float, *, target: float, samples: int, horizon: float) -> float:
    """Return the KL coefficient after n samples: c (1 + clip(kl / target - 1, +-0.2) min(n / horizon, 1)).

    Ziegler et al. (arXiv 1909.08593, section 2.2); ``AdaptiveKLController`` of TRL and verl, where n is a batch, a part
    of the horizon. Here it is an epoch; without the cap one of 5 horizons would turn the coefficient negative.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return kl_coef * (1 + error * min(samples / horizon, 1.0))


def overlong_penalty(lengths: Tensor, *, longest: int, buffer: int, factor: float) -> Tensor:
    """Return the penalty added to the score of completions near the limit, (N,) float64, 0 or less (DAPO, eq. 13).

    Args:
        lengths: (N,) tokens.
        longest: tokens a completion may have.
        buffer: tokens before it over which the penalty grows from 0.
        factor: the penalty at the limit.
    """
    over = lengths.double() - (longest - buffer)
    return -over.clamp(0, buffer) / buffer * factor
