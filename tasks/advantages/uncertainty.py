"""Finds samples whose reward is uncertain, because other rewards rank them lower. Pure, float64 inside.

Legend: N samples of an epoch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def win_rates(values: Tensor) -> Tensor:
    """Return the share of the other samples that each of (N,) beats, ties half, (N,) float64; NaN stays NaN."""
    rates = torch.full((len(values),), float("nan"), dtype=torch.float64)
    valid = ~values.isnan()
    scores = values[valid].double()
    ordered = scores.sort().values
    below = torch.searchsorted(ordered, scores, right=False)
    not_above = torch.searchsorted(ordered, scores, right=True)
    # One of the equal scores is the sample itself.
    beaten = (below + not_above - 1).double() / 2
    rates[valid] = beaten / max(1, len(scores) - 1)
    return rates


def uncertain(optimized: Tensor, others: Sequence[Tensor], share: float) -> Tensor:
    """Return which samples the optimized reward ranks suspiciously high, (N,) bool.

    u = w(optimized) - mean_m w(other_m), with w the win rate (GARDO, arXiv 2512.24138: its gate on the KL). Among the
    samples with u >= 0, those above the 1 - share quantile are uncertain. The public code takes the same quantile, of
    ranks within a batch.

    Args:
        optimized: (N,) weighted sum of rewards, NaN if missing.
        others: (N,) each, scores that are not optimized; NaN if missing.
        share: share of uncertain samples among those with u >= 0, between 0 and 1.
    """
    rates = torch.stack([win_rates(other) for other in others])
    gap = win_rates(optimized) - torch.nanmean(rates, dim=0)
    high = gap[gap >= 0]
    if not len(high):
        return torch.zeros(len(gap), dtype=torch.bool)
    return gap > torch.quantile(high, 1 - share) if share < 1 else gap >= 0
