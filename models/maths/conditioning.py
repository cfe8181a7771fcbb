"""Inputs of velocity functions in addition to latents: the conditioning of a model.
Legend: B rows, ... latent dims."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

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
    unconditional: Tensor | None = None
    """(B, ...) predictions for the negative prompt that are available already for the same latents."""

    def map(self, function: Callable[[Tensor], Tensor]) -> Conditioning:
        """Return the conditioning with a function applied to every tensor."""
        negative = None if self.negative is None else {k: function(v) for k, v in self.negative.items()}
        unconditional = None if self.unconditional is None else function(self.unconditional)
        return Conditioning({k: function(v) for k, v in self.positive.items()}, negative, unconditional)

    def rows(self, index: Tensor) -> Conditioning:
        """Return the rows at (B,) indices."""
        return self.map(lambda tensor: tensor[index])

    def to(self, device: torch.device) -> Conditioning:
        """Return it on a device."""
        return self.map(lambda tensor: tensor.to(device))

    def __len__(self) -> int:
        return len(next(iter(self.positive.values())))


class Guided(NamedTuple):
    """The guided prediction, and the one for the negative prompt."""

    velocity: Tensor
    """(B, ...) float32."""
    unconditional: Tensor | None
    """(B, ...) float32; None without guidance by two forwards."""


class GivesVelocity(Protocol):
    """The interface of models in sampling."""

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """Return (B, ...) float32 velocities, see ``DiffusionPolicy.velocity``."""

    def guided_velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Guided:
        """Return velocities and their unconditional parts; called only where those are stored."""
