"""Diffusion-DPO (arXiv 2311.12908) on a group's best and worst sample, at shared noise and level.

-log sigmoid(-beta / 2 (m - m_ref)) with m = error of the better sample minus that of the worse: it falls as the policy,
compared with the base model, fits the better sample more closely than the worse one, and is log 2 at the base model.
Two samples of equal advantage form no pair: such a group is left out, or contributes only its KL.

The algorithm is offline: it can use stored trajectories of any age.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import PositiveFloat

from flowmill.configs.option_types import Share
from flowmill.models.maths.transitions import expand
from flowmill.tasks.algorithms.base import Requirements, RowLoss, expect
from flowmill.tasks.algorithms.diffusion import DiffusionBatch, DiffusionModels, ForwardBatch
from flowmill.tasks.algorithms.forward import ForwardProcess, Prediction, errors
from flowmill.tasks.algorithms.objectives import dpo_loss, loser_share, pair_sign, unit_sum

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DPO(ForwardProcess):
    """Flow-Factory's ``trainers/dpo.py``."""

    beta: PositiveFloat = 2000.0
    """Inverse temperature; errors are means over latent dims, so it is large."""
    prediction: Prediction = "velocity"
    """The prediction whose errors are compared."""
    winner_margin: Share | None = None
    """Diffusion-SDPO's mu, 0 to 1: scale the worse sample's gradient down where it would raise the better sample's
    error, see ``objectives.loser_share``; at 1 it is 0 there. The loss keeps its value. None: no scaling."""

    @property
    def requires(self) -> Requirements:
        """Requires pairs at shared noise and the base model; a KL also groups without a pair."""
        return self.needs(levels=self.levels(shared=True), unit="pair", reference=True)

    def loss(self, batch: DiffusionBatch, models: DiffusionModels) -> RowLoss:
        """Return each pair's loss, on both of its rows; 0 where the two have the same advantage."""
        rows = expect(batch, ForwardBatch)
        velocity = models.velocity(rows)
        sign = pair_sign(rows.advantages, rows.units)
        metrics: dict[str, Tensor] = {}
        learned = self._damped(rows, velocity, sign, metrics)
        error, reference = errors(rows, learned, models.reference_velocity(rows), prediction=self.prediction)
        margin, reference_margin = (unit_sum(sign * values * rows.weights, rows.units) for values in (error, reference))
        loss = dpo_loss(margin, reference_margin, self.beta) * sign.abs()
        preferred = (margin < reference_margin).float()
        metrics |= {"preferred": preferred.detach(), "margin": (margin - reference_margin).detach()}
        return RowLoss(loss=self.add_kl(rows, models, velocity, loss, metrics), metrics=metrics)

    def _damped(self, rows: ForwardBatch, velocity: Tensor, sign: Tensor, metrics: dict[str, Tensor]) -> Tensor:
        """Return the velocities; the gradient of worse rows is scaled down."""
        if self.winner_margin is None:
            return velocity
        share = loser_share(velocity - rows.target, sign, rows.weights, rows.units, self.winner_margin)
        metrics["loser_share"] = share
        factor = expand(share, velocity)
        return factor * velocity + (1 - factor) * velocity.detach()
