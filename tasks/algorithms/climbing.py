"""Functions shared by algorithms that follow the gradient of rewards. Pure; shapes are (B,) unless stated.

Legend: B rows, ... latent dims.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flowmill.models.maths.transitions import expand


def fooled_note(name: str) -> str:
    """Return the note on reward hacking for users of the algorithm with this name."""
    return (
        f"optimize.algorithm '{name}' follows the gradient of the rewards, and learns to fool them sooner than "
        "algorithms that compare samples: watch monitors that are not optimized, and set kl_coef if they fall."
    )


def reward_shortfall(rewards: Tensor, margin: float | None) -> Tensor:
    """Return relu(margin - R), ReFL's loss (arXiv 2304.05977, eq. 6), or -R without a margin."""
    return -rewards if margin is None else torch.relu(margin - rewards)


def scaled_slopes(slopes: Tensor, size: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return slopes scaled to a root mean square, their original root mean squares, and a mask of flat rows.

    Slopes are scaled by a power of two before they are squared: no square underflows, and the scaling is exact.

    Args:
        slopes: (B, ...) gradients of rewards.
        size: root mean square of the result.

    Returns:
        (B, ...), 0 for flat rows; (B,); and (B,) bool: all values of the row are 0 or denormal, so its direction would
        be rounding noise.
    """
    largest = slopes.abs().flatten(1).amax(1)
    flat = largest < torch.finfo(slopes.dtype).tiny
    exponent = torch.where(flat, 0, torch.frexp(largest).exponent)
    scaled = torch.ldexp(slopes, expand(-exponent, slopes))
    rms = (scaled**2).flatten(1).mean(1).sqrt()
    factor = torch.where(flat, 0.0, size / torch.where(flat, 1.0, rms))
    return expand(factor, slopes) * scaled, torch.ldexp(rms, exponent), flat


def recovered(latents: Tensor, velocity: Tensor, noise: Tensor, level: Tensor, reached: Tensor) -> Tensor:
    """Return x^ = (x + (s_b - s) v - s_b eps) / (1 - s_b), Direct-Align's image (arXiv 2509.06942), (B, ...).

    Args:
        latents: x (B, ...).
        velocity: v (B, ...).
        noise: eps (B, ...) that x was noised with.
        level: s, the noise level of x.
        reached: s_b < 1, the level after the Euler step, below or above s.
    """
    stepped = latents + expand(reached - level, latents) * velocity
    return (stepped - expand(reached, noise) * noise) / expand(1 - reached, latents)
