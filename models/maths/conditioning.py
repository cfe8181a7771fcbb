"""Inputs of velocity functions in addition to latents: the conditioning of a model.
Legend: B rows, ... latent dims."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Conditioning:
    """Batch-first conditioning: every tensor has the sample on dim 0, so rows can be picked, joined and repeated."""

    positive: Mapping[str, Tensor]
    """Inputs of the family's denoiser."""
    negative: Mapping[str, Tensor] | None = None
    """The same for the negative prompt, with guidance."""

    def map(self, function: Callable[[Tensor], Tensor]) -> Conditioning:
        """Return the conditioning with a function applied to every tensor."""
        negative = None if self.negative is None else {k: function(v) for k, v in self.negative.items()}
        return Conditioning({k: function(v) for k, v in self.positive.items()}, negative)

    def rows(self, index: Tensor) -> Conditioning:
        """Return the rows at (B,) indices."""
        return self.map(lambda tensor: tensor[index])

    def to(self, device: torch.device) -> Conditioning:
        """Return it on a device."""
        return self.map(lambda tensor: tensor.to(device))

    def __len__(self) -> int:
        return len(next(iter(self.positive.values())))


class GivesVelocity(Protocol):
    """The interface of models in sampling."""

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """Return (B, ...) float32 velocities, see ``DiffusionPolicy.velocity``."""
