"""Two media of one model, each on a shift of its own, as one flow on one schedule. Pure.

A shift by a leads t to s = a t / (1 + (a - 1) t), whose odds s / (1 - s) are a times those of t. Where a model walks
one t with two media at shifts a and b, the odds of the first are r = a / b times those of the second at every moment.
So with c = s + r (1 - s), where s is the first's level, the second's is s / c, and its latents x = (1 - s / c) x0 +
s / c eps are

    y = c x = (1 - s) r x0 + s eps,

a flow from eps to r x0 at the levels of the first. Its velocity is eps - r x0 = ((1 - r) y + r v) / c, v = eps - x0.
Steps that keep noise levels (Euler's, CPS, DDIM with eta, Precise with Flow-SDE's noise) depend on odds alone, so they
are the steps of x on its own schedule. So is the mean of the Flow-SDE, whose std is sqrt(c / c') times that of x, c' at
the end of the step: 1 for small ones.

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
    """r, the other's shift by its own."""

    def length(self, sigma: Tensor) -> Tensor:
        """Return c, by which latents are longer in the chain than their own, at levels of any shape."""
        return sigma + self.ratio * (1 - sigma)

    def level(self, sigma: Tensor) -> Tensor:
        """Return its own noise levels at those of the chain, of any shape."""
        return sigma / self.length(sigma)

    def own(self, latents: Tensor, sigma: Tensor) -> Tensor:
        """Return x, as the model sees them, of (B, ...) latents of the chain at (B,) levels of the chain."""
        return latents / expand(self.length(sigma), latents)

    def velocity(self, latents: Tensor, velocity: Tensor, sigma: Tensor) -> Tensor:
        """Return the velocity of the chain, of its (B, ...) latents, x's own velocity and (B,) levels of the chain."""
        return ((1 - self.ratio) * latents + self.ratio * velocity) / expand(self.length(sigma), latents)

    def clean(self, latents: Tensor) -> Tensor:
        """Return x0 of latents at the end of a chain."""
        return latents / self.ratio
