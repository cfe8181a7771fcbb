"""Reward gradients from the store: g = d reward / d x0 at stored final latents; training needs no decoder or reward.

``linear`` is the loss -<g, x0^> with x0^ = x_t - t v. Its gradient with respect to v is t g. FlowBP's Sparse form
(arXiv 2606.11075) has exactly f |dt| g at a state of the rollout; ReFL (arXiv 2304.05977) takes g at x0^. The loss has
no optimum and is valid only where g was computed, so each sample is used once, in the epoch that drew it.

``bounded`` regresses x0^ on x0 + c g / rms(g), at the same distance from the sample for any scale of the reward. The
loss is the mean squared error divided by t, so that each level moves v equally. It has an optimum: one epoch of
gradients can be used for several passes. A row whose slope is 0, denormal, or a rounding residue of canceling rewards
has no direction: its loss is 0, and the metric ``flat`` counts it.

Both move the velocity so that samples move towards higher reward. g is the reward's slope at one image: only a KL keeps
the policy from fooling a reward. Samples are not compared with each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import PositiveFloat

from flowmill.models.maths.transitions import expand
from flowmill.tasks.algorithms.base import Requirements, RowLoss, expect
from flowmill.tasks.algorithms.climbing import fooled_note, scaled_slopes
from flowmill.tasks.algorithms.diffusion import DiffusionBatch, DiffusionModels, ForwardBatch
from flowmill.tasks.algorithms.forward import ForwardProcess

_LINEAR = (
    "optimize.algorithm.options.target is 'linear': a gradient is valid only at the image it was computed at, so "
    "samples are trained on once. 'bounded' allows several passes, and its strength does not depend on the reward's "
    "scale."
)
_BOUNDED = (
    "optimize.algorithm.options.target is 'bounded': every sample is moved equally far, by 'strength', regardless of "
    "its reward and of the slope there; 'linear' moves it in proportion to the slope."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardGradient(ForwardProcess):
    """One forward with gradient per row; for 'linear' only the learning rate limits the size of a step."""

    target: Literal["bounded", "linear"] = "bounded"
    """Regression on samples moved along the gradient, or the gradient itself."""
    strength: PositiveFloat = 0.3
    """c: distance that samples are moved, in units of latents (std near 1); with 'linear' a factor of the loss."""

    @property
    def requires(self) -> Requirements:
        """Requires forward data with gradients; a KL also the base model or the average."""
        linear = self.target == "linear"
        return self.needs(
            levels=self.levels(),
            min_group_size=1,
            zero_advantages=True,
            advantages=False,
            gradients=True,
            once=linear,
            notes=(fooled_note("reward_gradient"), _LINEAR if linear else _BOUNDED),
        )

    def loss(self, batch: DiffusionBatch, models: DiffusionModels) -> RowLoss:
        """Return the loss of the target, plus a KL if set."""
        rows = expect(batch, ForwardBatch)
        if rows.gradients is None:
            raise TypeError("reward_gradient needs the gradients of the rewards")
        velocity, time = models.velocity(rows), rows.grid.sigma
        # x0^ - x0, written with the error of the velocity: exactly 0 if the policy predicts the sample.
        moved = expand(time, velocity) * (rows.target - velocity)
        gain = (rows.gradients * moved).flatten(1).sum(1)
        target, rms, flat = scaled_slopes(rows.gradients, self.strength)
        if self.target == "linear":
            loss = -self.strength * gain
        else:
            loss = torch.where(flat, 0.0, ((moved - target) ** 2).flatten(1).mean(1) / time)
        metrics = {
            "gain": gain.detach(),
            "gradient_rms": rms,
            "moved": (moved.detach() ** 2).flatten(1).mean(1).sqrt(),
            "flat": flat.float(),
        }
        return RowLoss(loss=self.add_kl(rows, models, velocity, loss, metrics), metrics=metrics)
