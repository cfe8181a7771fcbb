"""ReFL and DRaFT: denoising continues from stored states with a gradient, and training maximizes the final reward.

From a state x_i of a rollout it runs K = ``steps`` forwards: K - 1 Euler steps of the rollout's schedule, then the
prediction x^ = x - s v, which is decoded and scored. The loss is scale relu(margin - R(x^)), or -scale R(x^) without a
margin.

ReFL (arXiv 2304.05977; THUDM/ImageReward, ``ReFL.py``) is K = 1 from one of the last states (30 to 39 of 40), margin
2, scale 1e-3 with ImageReward. DRaFT-K (arXiv 2309.17400) is K forwards from state T - K, where x^ is the final latents
and the gradient passes through the Jacobians of all K forwards; DRaFT-1 is the last step alone. AlignProp (arXiv
2310.03739) is DRaFT-K with ``truncate``: the number of last forwards with a gradient is drawn for each row.

Unlike gradients at stored final latents (``reward_gradient``), the reward is computed at the *current* prediction, so
rows can be used in several passes. The cost is a decoder and reward call with gradient for each row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from pydantic import PositiveFloat, PositiveInt

from flowmill.models.maths.transitions import Grid, expand
from flowmill.tasks.algorithms.base import Requirements, RowLoss, expect
from flowmill.tasks.algorithms.climbing import fooled_note, reward_shortfall
from flowmill.tasks.algorithms.diffusion import DiffusionBatch, DiffusionModels, StateBatch
from flowmill.tasks.algorithms.forward import VelocityKL


@dataclass(frozen=True, slots=True, kw_only=True)
class ReFL(VelocityKL):
    """``steps`` forwards with gradient per row, and one of decoder and rewards."""

    steps: PositiveInt = 1
    """K: forwards from a stored state; the last one predicts the image."""
    truncate: bool = False
    """Pass the gradient through the last 1 to K forwards only, drawn for each row, instead of all."""
    margin: float | None = None
    """Reward above which the loss is 0; None: no such limit."""
    scale: PositiveFloat = 1.0
    """Factor of the loss."""

    def __post_init__(self) -> None:
        if self.truncate and self.steps == 1:
            raise ValueError("truncate is true, but steps is 1, so no forward can be left out.")

    @property
    def requires(self) -> Requirements:
        """Requires stored states and the rewards; a KL also the base model or the average."""
        return Requirements(
            data="states",
            rewards=1,
            calls=self.steps,
            advantages=False,
            zero_advantages=True,
            reference=self.kl_coef > 0,
            average=self.ema_kl_coef > 0,
            notes=(fooled_note("refl"),),
        )

    def loss(self, batch: DiffusionBatch, models: DiffusionModels) -> RowLoss:
        """Return the shortfall of the rewards from the margin, plus a KL at the stored states if set."""
        rows = expect(batch, StateBatch)
        levels = rows.levels.unbind(1)
        latents, following = rows.latents, [*levels[1:], torch.zeros_like(levels[0])]
        velocities = []
        for place, (level, after) in enumerate(zip(levels, following, strict=True)):
            if self.truncate and rows.subjects is not None:
                # Rows whose drawn number of forwards remains: detach the input, so the gradient stops here.
                last = [1 + draw % self.steps == self.steps - place for draw in rows.subjects.draws]
                latents = torch.where(expand(torch.tensor(last).to(latents.device), latents), latents.detach(), latents)
            velocity = models.velocity(replace(rows, latents=latents, grid=Grid(level, after, level)))
            velocities.append(velocity)
            latents = latents + expand(after - level, latents) * velocity
        rewards = models.rewards_of(latents, rows)
        loss = self.scale * reward_shortfall(rewards, self.margin)
        metrics = {"predicted_reward": rewards.detach()}
        return RowLoss(loss=self.add_kl(rows, models, velocities[0], loss, metrics), metrics=metrics)
