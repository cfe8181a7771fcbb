"""Moving averages of trained weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flowmill.models.weights.sharding import local


class Ema:
    """Exponential moving average of trained parameters, float32 on the parameters' device."""

    def __init__(self, parameters: Sequence[Tensor], *, decay: float) -> None:
        self.decay = decay
        self.values = [parameter.detach().clone() for parameter in parameters]

    @torch.no_grad()
    def update(self, parameters: Sequence[Tensor], count: int) -> None:
        """Move towards the parameters with ``warm_decay(count, self.decay)``, ``count`` updates so far."""
        weight = 1 - warm_decay(count, self.decay)
        torch._foreach_lerp_([local(v) for v in self.values], [local(p.detach()) for p in parameters], weight)


def warm_decay(count: int, decay: float) -> float:
    """Return min((1 + n) / (10 + n), decay) for n = ``count`` optimizer updates: a mean that forgets its start sooner.
    Flow-GRPO ``ema.py:get_current_decay``; Flow-Factory's 'power' schedule is the same."""
    return min((1 + count) / (10 + count), decay)
