"""Reward gradients from the store: g = d reward / d x0 at stored final latents, trained on without decoder or reward.

``linear`` is the loss -<g, x0^> with x0^ = x_t - t v: the gradient with respect to v is t g, as that of FlowBP's Sparse
form (arXiv 2606.11075) is f |dt| g at a state of the rollout, exactly, and as ReFL (arXiv 2304.05977) has it at x0^. It
has no optimum: it is right where g was taken, so each sample is passed over once, in the epoch that made it.

``bounded`` regresses x0^ on x0 + c g / rms(g), as far from the sample whatever the reward's scale: mean of the squared
error over t, so that each level moves v alike. It has an optimum: one epoch of gradients may be passed over often.
A row whose slope is 0, denormal, or what rewards that cancel leave by rounding has no direction: its loss is 0, and the
metric ``flat`` counts it.

Both move the velocity so that samples go where the reward rises. g is the reward's slope at one image: nothing holds a
policy back where a reward is fooled, but a KL. No sample is compared with others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from models.maths.transitions import expand
from tasks.algorithms.base import Requirements, RowLoss, expect
from tasks.algorithms.climbing import fooled_note, scaled_slopes
from tasks.algorithms.diffusion import DiffusionBatch, DiffusionModels, ForwardBatch
from tasks.algorithms.forward import ForwardProcess

_LINEAR = (
    "optimize.algorithm.options.target is 'linear': a gradient is that of the image it was taken at, so samples are "
    "trained on once. 'bounded' may be passed over often, and its strength does not depend on the reward's scale."
)
_BOUNDED = (
    "optimize.algorithm.options.target is 'bounded': every sample is moved equally far, by 'strength', whatever its "
    "reward and however flat the reward is there; 'linear' moves it as far as the slope says."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardGradient(ForwardProcess):
    """One forward with gradient per row; how far a step goes depends on the learning rate alone for 'linear'."""

    target: Literal["bounded", "linear"] = "bounded"
    """Regression on samples that were moved along the gradient, or the gradient itself."""
    strength: float = 0.3
    """c: how far samples are moved, in units of latents (whose std is about 1); with 'linear' a factor of the loss."""

    def __post_init__(self) -> None:
        """Check the options."""
        if self.target not in ("bounded", "linear"):
            raise ValueError(f"target is {self.target!r}; it must be 'bounded' or 'linear'.")
        if not self.strength > 0:
            raise ValueError(f"strength is {self.strength}; it must be above 0.")
        self.check_kl()
        self.levels()

    @property
    def requires(self) -> Requirements:
        """Forward data with gradients; for a KL the base model or the average."""
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
        """Return the loss of the target, plus a KL if asked for."""
        rows = expect(batch, ForwardBatch)
        if rows.gradients is None:
            raise TypeError("reward_gradient needs the gradients of the rewards")
        velocity, time = models.velocity(rows), rows.grid.sigma
        # x0^ - x0, written with the error of the velocity: exactly 0 where the policy draws the sample.
        moved = expand(time, velocity) * (rows.target - velocity)
        gain = (rows.gradients * moved).flatten(1).sum(1)
        wanted, rms, flat = scaled_slopes(rows.gradients, self.strength)
        if self.target == "linear":
            loss = -self.strength * gain
        else:
            loss = torch.where(flat, 0.0, ((moved - wanted) ** 2).flatten(1).mean(1) / time)
        metrics = {
            "gain": gain.detach(),
            "gradient_rms": rms,
            "moved": (moved.detach() ** 2).flatten(1).mean(1).sqrt(),
            "flat": flat.float(),
        }
        return RowLoss(loss=self.add_kl(rows, models, velocity, loss, metrics), metrics=metrics)
