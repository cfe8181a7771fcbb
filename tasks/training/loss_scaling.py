"""Loss scaling for a float16 forward: small gradients would underflow to 0 in a half-precision backward.

The scale is a power of two, so dividing by it in float32 is exact. ``torch.amp.GradScaler`` skips updates; here
an update that overflows is computed again at a smaller scale, because its rows are in the store.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from flowmill.models.weights.sharding import local, number

#: Decrease of the exponent after an overflow.
_STEP = 2
#: Updates without overflow after which the scale doubles; a run has only hundreds of updates.
_PATIENCE = 100
_LARGEST = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """The scale of the next update (immutable)."""

    exponent: int = 16
    """Losses are multiplied by 2 to this power, and by the row count that the mean divides by."""
    quiet: int = 0
    """Updates since the last overflow or growth."""

    def factor(self, rows: int) -> float:
        """Return the factor of an update's mean loss.

        It includes the number of rows, rounded up to a power of two, so that each row's backward works in the same
        range for any number of rows.
        """
        return float(2.0 ** (self.exponent + (rows - 1).bit_length()))

    def smaller(self) -> LossScale:
        """Return the scale to try after an overflow."""
        return LossScale(exponent=max(0, self.exponent - _STEP))

    def after_update(self) -> LossScale:
        """Return the scale that follows an update without overflow."""
        if self.quiet + 1 < _PATIENCE:
            return LossScale(exponent=self.exponent, quiet=self.quiet + 1)
        return LossScale(exponent=min(_LARGEST, self.exponent + 1))

    @property
    def exhausted(self) -> bool:
        """True if no smaller scale is left to try."""
        return self.exponent == 0


def loss_scale(dtype: str) -> LossScale | None:
    """Return the initial scale for a forward in ``dtype``; None if none is needed."""
    return LossScale() if dtype == "float16" else None


def unscale(parameters: Iterable[nn.Parameter], factor: float) -> bool:
    """Divide gradients by a power of two, in place; return whether all of them are finite."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    torch._foreach_mul_([local(gradient) for gradient in gradients], 1 / factor)
    return math.isfinite(number(torch.nn.utils.get_total_norm(gradients)))
