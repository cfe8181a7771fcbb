"""Two media of one model, each with its own shift, as one flow on one schedule. Pure.

A shift by a maps t to s = a t / (1 + (a - 1) t), whose odds s / (1 - s) are a times those of t. Where a model denoises
two media at shifts a and b with one t, the odds of the first are always r = a / b times those of the second.
So with c = s + r (1 - s), where s is the first's level, the second's is s / c, and its latents x = (1 - s / c) x0 +
s / c eps are

    y = c x = (1 - s) r x0 + s eps,

a flow from eps to r x0 at the levels of the first. Its velocity is eps - r x0 = ((1 - r) y + r v) / c, v = eps - x0.
Steps that preserve noise levels (Euler's, CPS, DDIM with eta, Precise with Flow-SDE's noise) depend on odds alone, so
they equal the steps of x on its own schedule. The mean of the Flow-SDE does too; its std is sqrt(c / c') times that of
x, with c' at the end of the step: about 1 for small steps.

Legend: B rows, ... latent dims.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from models.maths.transitions import expand

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Joined:
    """A medium whose odds are ``ratio`` times smaller than those of the medium it is joined with."""

    ratio: float
    """r, the other medium's shift over its own."""

    def length(self, sigma: Tensor) -> Tensor:
        """Return c = y / x, the scale of latents in the chain, at levels of any shape."""
        return sigma + self.ratio * (1 - sigma)

    def level(self, sigma: Tensor) -> Tensor:
        """Return its own noise levels for levels of the chain, of any shape."""
        return sigma / self.length(sigma)

    def own(self, latents: Tensor, sigma: Tensor) -> Tensor:
        """Return x, the model's input, from (B, ...) latents of the chain at (B,) levels of the chain."""
        return latents / expand(self.length(sigma), latents)

    def velocity(self, latents: Tensor, velocity: Tensor, sigma: Tensor) -> Tensor:
        """Return the chain's velocity from its (B, ...) latents, x's velocity and (B,) levels of the chain."""
        return ((1 - self.ratio) * latents + self.ratio * velocity) / expand(self.length(sigma), latents)

    def clean(self, latents: Tensor) -> Tensor:
        """Return x0 from latents at the end of a chain."""
        return latents / self.ratio
