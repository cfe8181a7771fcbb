"""ReFL and DRaFT: denoising goes on from stored states with a gradient, and the reward of where it leads is climbed.

From a state x_i of a rollout, K = ``steps`` forwards: K - 1 Euler steps of the rollout's schedule, then the prediction
x^ = x - s v, which is decoded and scored; loss = scale relu(margin - R(x^)), or -scale R(x^) without a margin.

ReFL (arXiv 2304.05977; THUDM/ImageReward, ``ReFL.py``) is K = 1 from one of the last states (30 to 39 of 40), margin
2, scale 1e-3 with ImageReward. DRaFT-K (arXiv 2309.17400) is K forwards from state T - K, where x^ is the final latents
and the gradient passes through the Jacobians of all K; DRaFT-1 the last step alone. AlignProp (arXiv 2310.03739) is
DRaFT-K with ``truncate``: how many of the last forwards a gradient passes through is drawn for each row.

Unlike gradients at stored final latents (``reward_gradient``), the reward is asked at where the policy leads *now*, so
rows may be passed over often; what that costs is decoder and reward, with gradient, for every row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from models.maths.transitions import Grid, expand
from tasks.algorithms.base import Requirements, RowLoss, expect
from tasks.algorithms.climbing import fooled_note, reward_shortfall
from tasks.algorithms.diffusion import DiffusionBatch, DiffusionModels, StateBatch
from tasks.algorithms.forward import VelocityKL


@dataclass(frozen=True, slots=True, kw_only=True)
class ReFL(VelocityKL):
    """``steps`` forwards with gradient per row, and one of decoder and rewards."""

    steps: int = 1
    """K: forwards from a stored state, the last of which predicts the image."""
    truncate: bool = False
    """Let the gradient through the last 1 to K of them, drawn for each row, instead of all."""
    margin: float | None = None
    """Reward above which nothing is learned any more; None: there is none."""
    scale: float = 1.0
    """Factor of the loss."""

    def __post_init__(self) -> None:
        """Check the options."""
        if self.steps < 1 or not self.scale > 0:
            raise ValueError(f"steps is {self.steps} and scale {self.scale}; steps must be at least 1, scale above 0.")
        if self.truncate and self.steps == 1:
            raise ValueError("truncate is true, but steps is 1, of which nothing can be left out.")
        self.check_kl()

    @property
    def requires(self) -> Requirements:
        """Stored states, and the rewards; for a KL the base model or the average."""
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
        """Return what the rewards lack of the margin, plus a KL at the stored states if asked for."""
        rows = expect(batch, StateBatch)
        levels = rows.levels.unbind(1)
        latents, following = rows.latents, [*levels[1:], torch.zeros_like(levels[0])]
        velocities = []
        for place, (level, after) in enumerate(zip(levels, following, strict=True)):
            if self.truncate and rows.subjects is not None:
                # With so many forwards left a gradient passes through all of them, and not to what came before.
                last = [1 + draw % self.steps == self.steps - place for draw in rows.subjects.draws]
                latents = torch.where(expand(torch.tensor(last).to(latents.device), latents), latents.detach(), latents)
            velocity = models.velocity(replace(rows, latents=latents, grid=Grid(level, after, level)))
            velocities.append(velocity)
            latents = latents + expand(after - level, latents) * velocity
        rewards = models.asked(latents, rows)
        loss = self.scale * reward_shortfall(rewards, self.margin)
        metrics = {"predicted_reward": rewards.detach()}
        return RowLoss(loss=self.add_kl(rows, models, velocities[0], loss, metrics), metrics=metrics)
