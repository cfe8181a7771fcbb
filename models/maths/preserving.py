"""Variance-preserving diffusion as a flow: noise levels, latents and predictions. Pure.

With a = sqrt(alpha_bar), b = sqrt(1 - alpha_bar), the latents a x0 + b eps become flow latents x = (a x0 + b eps) /
(a + b) at sigma = b / (a + b), with the velocity eps - x0. In these coordinates the deterministic DDIM step is the
Euler step, and the DDIM step with eta is the sampler ``ddim`` (log-probs differ by a constant that cancels).

Legend: B rows, ... latent dims.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from flowmill.models.maths.transitions import expand, predictions


def flow_sigma(alpha_bar: Tensor) -> Tensor:
    """Return b / (a + b) in float64 for alpha_bar of any shape."""
    a, b = alpha_bar.double().sqrt(), (1 - alpha_bar.double()).sqrt()
    return b / (a + b)


def flow_length(sigma: Tensor) -> Tensor:
    """Return 1 / (a + b), the factor from variance-preserving to flow latents at a sigma."""
    return torch.sqrt((1 - sigma) ** 2 + sigma**2)


def clean_ends(latents: Tensor, sigma: Tensor) -> Tensor:
    """Return the clean latents for the final latents of a chain, as a pipeline decodes them.

    Some schedules end above level 0 (Stable Diffusion's at 0.028). Their pipelines decode a x0 + b eps, the
    variance-preserving latents of that level, as if they were x0; flow latents are shorter by ``flow_length``. For a
    chain that ends at level 0 the two are bitwise equal.

    Args:
        latents: (B, ...) flow latents at the end of a chain.
        sigma: (B,) or (1,) level at that end.
    """
    return latents / expand(flow_length(sigma), latents).to(latents)


@dataclass(frozen=True, slots=True)
class Preserving:
    """Latents as model input, at the levels of its training schedule."""

    noisy: Tensor
    """(B, ...) a x0 + b eps."""
    a: Tensor
    """(B, 1, ...)"""
    b: Tensor
    """(B, 1, ...)"""

    @classmethod
    def of(cls, latents: Tensor, alpha_bar: Tensor) -> Preserving:
        """Return the model input for (B, ...) flow latents at (B,) levels."""
        alpha = expand(alpha_bar, latents)
        a, b = alpha.sqrt(), (1 - alpha).sqrt()
        return cls(latents * (a + b), a, b)


class Prediction(Protocol):
    """A prediction type, converted from and to a velocity."""

    def velocity(self, predicted: Tensor, at: Preserving) -> Tensor:
        """Return eps - x0, (B, ...)."""

    def predicted(self, latents: Tensor, velocity: Tensor, sigma: Tensor, at: Preserving) -> Tensor:
        """Return the model's prediction, (B, ...), for a velocity of flow latents at (B,) sigmas."""


class Epsilon:
    """The noise (DDPM, arXiv 2006.11239); not defined at a = 0, where latents contain nothing of x0."""

    def velocity(self, predicted: Tensor, at: Preserving) -> Tensor:
        """Return eps - (noisy - b eps) / a."""
        return predicted - (at.noisy - at.b * predicted) / at.a

    def predicted(self, latents: Tensor, velocity: Tensor, sigma: Tensor, at: Preserving) -> Tensor:
        """Return eps."""
        return predictions(latents, velocity, sigma)[1]


class VPrediction:
    """v = a eps - b x0 (arXiv 2202.00512), so that eps = a v + b noisy and x0 = a noisy - b v."""

    def velocity(self, predicted: Tensor, at: Preserving) -> Tensor:
        """Return eps - x0."""
        return (at.a * predicted + at.b * at.noisy) - (at.a * at.noisy - at.b * predicted)

    def predicted(self, latents: Tensor, velocity: Tensor, sigma: Tensor, at: Preserving) -> Tensor:
        """Return a eps - b x0."""
        clean, noise = predictions(latents, velocity, sigma)
        return at.a * noise - at.b * clean


class StepSample:
    """The clean latents; eps = (noisy - a x0) / b."""

    def velocity(self, predicted: Tensor, at: Preserving) -> Tensor:
        """Return eps - x0."""
        return (at.noisy - at.a * predicted) / at.b - predicted

    def predicted(self, latents: Tensor, velocity: Tensor, sigma: Tensor, at: Preserving) -> Tensor:
        """Return x0."""
        return predictions(latents, velocity, sigma)[0]


#: Prediction types by their name in ``prediction_type`` of diffusers' schedulers.
PREDICTIONS: Mapping[str, Prediction] = {"epsilon": Epsilon(), "v_prediction": VPrediction(), "sample": StepSample()}
