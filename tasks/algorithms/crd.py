"""CRD, centered reward distillation (arXiv 2603.14128): match an implicit reward to the advantages within a group.

The implicit reward of a sample is the error of the behavior policy on it minus that of the policy. It and the
preference are centered within the group, so the unknown normalizer cancels. Training raises the implicit reward of
samples above the group's center and lowers that of samples below it. At the behavior policy all implicit rewards are 0.
A group whose advantages are all equal has no gradient, so it is left out unless there is a KL.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from pydantic import PositiveFloat
from torch import Tensor

from flowmill.models.devices import widened
from flowmill.tasks.algorithms.base import Requirements, RowLoss, expect
from flowmill.tasks.algorithms.diffusion import DiffusionBatch, DiffusionModels, ForwardBatch
from flowmill.tasks.algorithms.forward import Decay, ForwardProcess, decay_of
from flowmill.tasks.algorithms.objectives import centered, preference, unit_softmax, unit_uniform


@dataclass(frozen=True, slots=True, kw_only=True)
class CRD(ForwardProcess):
    """Flow-Factory's ``trainers/crd.py``, with groups by prompt."""

    beta: PositiveFloat = 1.0
    """Scale of the implicit reward."""
    scale: PositiveFloat = 5.0
    """Advantages of +-scale are the strongest preference, and the loss is multiplied by it."""
    distance: Literal["mse", "bce"] = "mse"
    """Distance between centered implicit rewards and centered preferences."""
    temperature: float = -1.0
    """Temperature of the centering weights. Below 0: uniform weights. Above 0: the mean of two losses, with softmax
    weights towards the best and towards the worst samples. 0: the same with temperature 1, once over the samples with
    positive and once over those with negative advantages."""
    public_pools: bool = False
    """With temperature 0, split the samples at preference 0 instead of 1/2, as the public code does: all advantages
    except -scale count as positive, and none as negative."""
    adaptive: bool = True
    """Divide each error by its mean absolute error."""
    decay: Decay = field(default_factory=dict)
    """Decay of the behavior policy, see ``base.BehaviorDecay``: flat, rate, maximum, start."""
    detach_center: bool = False
    """Keep the gradient out of the center, as the public code does."""

    def switched_off(self) -> str | None:
        """Return why public_pools does nothing, if so."""
        idle = self.public_pools and self.temperature != 0
        return f"public_pools acts with temperature 0, and temperature is {self.temperature}" if idle else None

    @property
    def requires(self) -> Requirements:
        """Requires whole groups at shared noise and the behavior policy; a KL also the base model and all groups."""
        return self.needs(levels=self.levels(shared=True), unit="group", behavior=True, decay=decay_of(self.decay))

    def loss(self, batch: DiffusionBatch, models: DiffusionModels) -> RowLoss:
        """Return the distance per row, times scale / beta."""
        rows = expect(batch, ForwardBatch)
        velocity = models.velocity(rows)
        behavior = models.behavior_velocity(rows, velocity)
        implicit = crd_error(behavior, rows.target, adaptive=self.adaptive) - crd_error(
            velocity, rows.target, adaptive=self.adaptive
        )
        targets = preference(rows.advantages, self.scale).to(implicit.dtype)
        loss = (self.scale / self.beta) * self.compare(implicit, targets, rows.units).to(velocity.dtype)
        metrics = {"implicit_reward": implicit.detach().float()}
        return RowLoss(loss=self.add_kl(rows, models, velocity, loss, metrics), metrics=metrics)

    def compare(self, implicit: Tensor, targets: Tensor, units: Tensor) -> Tensor:
        """Return the distance of centered implicit rewards (B,) to centered preferences (B,)."""
        if self.temperature < 0:
            return self._compare(implicit, targets, units, unit_uniform(units, targets.dtype))
        middle = 0.0 if self.public_pools else 0.5
        best, worst = (
            unit_softmax(signed, units, self.temperature)
            if self.temperature > 0
            else unit_softmax(signed, units, 1.0, among=signed > sign * middle)
            for sign, signed in ((1, targets), (-1, -targets))
        )
        return (self._compare(implicit, targets, units, best) + self._compare(implicit, targets, units, worst)) / 2

    def _compare(self, implicit: Tensor, targets: Tensor, units: Tensor, weights: Tensor) -> Tensor:
        ours = self.beta * centered(implicit, weights, units, detach=self.detach_center)
        theirs = centered(targets, weights, units)
        if self.distance == "mse":
            return (ours - theirs) ** 2
        return torch.nn.functional.binary_cross_entropy_with_logits(ours, torch.sigmoid(theirs), reduction="none")


def crd_error(velocity: Tensor, target: Tensor, *, adaptive: bool) -> Tensor:
    """Return (B,) mean squared errors; if ``adaptive``, each divided by its mean absolute error, in float64."""
    difference = velocity - target
    if not adaptive:
        return (difference**2).flatten(1).mean(1)
    exact = widened(difference)
    scale = exact.detach().abs().flatten(1).mean(1).clamp(min=1e-5)
    return (exact**2).flatten(1).mean(1) / scale
