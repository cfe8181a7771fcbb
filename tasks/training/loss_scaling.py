"""Loss scaling for a float16 forward: small gradients would underflow to 0 in a half-precision backward.

A power of two, so that taking it off again in float32 changes no bit. Unlike ``torch.amp.GradScaler`` nothing is
skipped: the rows of an update are in the store, so an update that overflows is computed again at a smaller scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from models.weights.sharding import local, number

if TYPE_CHECKING:
    from torch import nn

#: Exponents tried in turn at an overflow lie this far apart.
_STEP = 2
#: Updates without overflow after which the scale doubles; a run has hundreds, pre-training hundred thousands.
_PATIENCE = 100
_LARGEST = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """The scale of the next update; a new one is made, none is changed."""

    exponent: int = 16
    """Losses are multiplied by two to this power, and by the number of rows they are divided by."""
    quiet: int = 0
    """Updates since the last overflow or growth."""

    def factor(self, rows: int) -> float:
        """Return the factor of an update's mean loss.

        The number of rows, rounded up to a power of two, is part of it: the backward of each row then works in the same
        range however many rows share the update.
        """
        return float(2.0 ** (self.exponent + (rows - 1).bit_length()))

    def smaller(self) -> LossScale:
        """Return the scale to try after an overflow."""
        return LossScale(exponent=max(0, self.exponent - _STEP))

    def after_update(self) -> LossScale:
        """Return the scale of the update after one that did not overflow."""
        if self.quiet + 1 < _PATIENCE:
            return LossScale(exponent=self.exponent, quiet=self.quiet + 1)
        return LossScale(exponent=min(_LARGEST, self.exponent + 1))

    @property
    def exhausted(self) -> bool:
        """True where no smaller scale is left to try."""
        return self.exponent == 0


def loss_scale(dtype: str) -> LossScale | None:
    """Return the scale a run starts with for a forward in ``dtype``; None where none is needed."""
    return LossScale() if dtype == "float16" else None


def unscale(parameters: Iterable[nn.Parameter], factor: float) -> bool:
    """Divide gradients by a power of two, in place; return whether all of them are finite."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    torch._foreach_mul_([local(gradient) for gradient in gradients], 1 / factor)
    return math.isfinite(number(torch.nn.utils.get_total_norm(gradients)))
