"""DGPO (Luo-Yihong/DGPO): a group-level preference of flow-matching errors, without a policy ratio.

The loss w A d lowers the error d of rows with A > 0 and raises that of rows with A < 0. The weight w is shared within a
group, a sigmoid of sum A (d - d_base): near 1 while the policy fits the group's better samples worse than the base
model does, near 0 once it fits them better, and 1/2 at the base model. Rows of advantage 0 contribute only to the KL;
a group of such rows is left out without one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from pydantic import PositiveFloat

from flowmill.tasks.algorithms.base import Requirements, RowLoss, expect
from flowmill.tasks.algorithms.diffusion import DiffusionBatch, DiffusionModels, ForwardBatch
from flowmill.tasks.algorithms.forward import Decay, ForwardProcess, decay_of, errors
from flowmill.tasks.algorithms.objectives import dgpo_weight
from flowmill.tasks.algorithms.ratios import RatioClip, policy_ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class DGPO(ForwardProcess, RatioClip):
    """Flow-Factory's ``trainers/dgpo.py``."""

    beta: PositiveFloat = 100.0
    """Inverse temperature of the group weight."""
    clip_range: PositiveFloat = 1e-2
    """A row is frozen if its ratio to the behavior policy left 1 +- clip_range on the side of its advantage."""
    decay: Decay = field(default_factory=dict)
    """Decay of the behavior policy, see ``base.BehaviorDecay``: flat, rate, maximum, start. The behavior policy makes
    the rollouts, like Flow-Factory's EMA with ``off_policy``; without a decay the policy itself does."""

    @property
    def requires(self) -> Requirements:
        """Requires whole groups at shared, constant noise, the behavior policy and the base model; a KL all groups."""
        levels = self.levels(shared=True, constant_noise=True)
        decay = decay_of(self.decay)
        return self.needs(levels=levels, unit="group", behavior=True, reference=True, decay=decay)

    def loss(self, batch: DiffusionBatch, models: DiffusionModels) -> RowLoss:
        """Return w A d per row."""
        rows = expect(batch, ForwardBatch)
        velocity = models.velocity(rows)
        behavior = models.behavior_velocity(rows, velocity)
        error, old, reference = errors(rows, velocity, behavior, models.reference_velocity(rows))
        ratio, (low, high) = policy_ratio((old - error).detach()), self.clip
        beyond = torch.where(rows.advantages > 0, ratio > 1 + high, ratio < 1 - low)
        frozen = beyond & (rows.advantages != 0)
        live = torch.where(frozen, error.detach(), error)
        weight = dgpo_weight(rows.advantages * rows.weights, error.detach(), reference, rows.units, self.beta)
        metrics = {"frozen": frozen.float(), "group_weight": weight, "error": error.detach()}
        loss = self.add_kl(rows, models, velocity, weight * rows.advantages * live, metrics)
        return RowLoss(loss=loss, metrics=metrics)
