"""The loss against a float64 reference written out slowly, finite differences, and its identities."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from models.policies.base import Conditioning
from models.transitions import FlowSDE, Grid
from tasks.algorithms.base import Batch, Models
from tasks.algorithms.grpo import GRPO

ROWS, SHAPE = 5, (2, 3)


class LinearPolicy:
    """v = scale * x + shift: the smallest policy with a gradient; its reference is scale 0.3."""

    def __init__(self, scale: float) -> None:
        self.scale = torch.tensor(scale, dtype=torch.float64, requires_grad=True)
        self.policy = self

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Any) -> Tensor:
        return self.scale * latents + 0.1

    def reference_velocity(self, latents: Tensor, sigma: Tensor, conditioning: Any) -> Tensor:
        return 0.3 * latents + 0.1


def batch(behavior: LinearPolicy, noise_level: float = 0.7) -> Batch:
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    sigma = torch.linspace(1.0, 0.2, ROWS, dtype=torch.float64)
    grid = Grid(sigma, sigma - 0.2, torch.full_like(sigma, 0.8))
    latents = draw(ROWS, *SHAPE)
    step = FlowSDE(noise_level).step(latents, behavior.velocity(latents, sigma, None).detach(), grid)
    following = step.sample(draw(ROWS, *SHAPE))
    return Batch(
        latents=latents,
        next_latents=following,
        grid=grid,
        old_log_probs=step.log_prob(following),
        advantages=draw(ROWS),
        conditioning=Conditioning({}),
        weights=torch.ones(ROWS, dtype=torch.float64),
    )


def slow_loss(policy: LinearPolicy, rows: Batch, clip: float, kl_coef: float, noise_level: float = 0.7) -> float:
    """The same formulas, one number at a time, in python floats."""
    total = 0.0
    for r in range(ROWS):
        sigma, following, second = (
            float(t[r]) for t in (rows.grid.sigma, rows.grid.sigma_next, rows.grid.sigma_second)
        )
        dt, safe = following - sigma, min(sigma, second) if sigma > 0.99 else sigma
        s = noise_level * math.sqrt(sigma / (1 - safe))
        log_prob = kl = 0.0
        x, y = rows.latents[r].flatten().tolist(), rows.next_latents[r].flatten().tolist()
        for xi, yi in zip(x, y, strict=True):
            means = []
            for scale in (policy.scale.item(), 0.3):
                v = scale * xi + 0.1
                means.append(xi + (v + s**2 / (2 * sigma) * (xi + (1 - sigma) * v)) * dt)
            variance = s**2 * -dt
            log_prob += -((yi - means[0]) ** 2) / (2 * variance) - 0.5 * math.log(2 * math.pi * variance)
            kl += (means[0] - means[1]) ** 2 / (2 * variance)
        ratio = math.exp(log_prob / len(x) - float(rows.old_log_probs[r]))
        advantage = float(rows.advantages[r])
        total += max(-advantage * ratio, -advantage * min(max(ratio, 1 - clip), 1 + clip)) + kl_coef * kl / len(x)
    return total / ROWS


def loss_of(policy: LinearPolicy, rows: Batch, algorithm: GRPO) -> Tensor:
    models = Models(trainable=policy, kernel=FlowSDE(0.7))  # type: ignore[arg-type]
    return algorithm.loss(rows, models).loss.mean()


@pytest.mark.parametrize("kl_coef", [0.0, 0.5])
@pytest.mark.parametrize("scale", [0.5, 0.52, 0.9])
def test_loss_equals_the_slow_one(scale: float, kl_coef: float) -> None:
    rows = batch(LinearPolicy(0.5))
    ours = loss_of(LinearPolicy(scale), rows, GRPO(clip_range=0.01, kl_coef=kl_coef))
    assert float(ours.detach()) == pytest.approx(slow_loss(LinearPolicy(scale), rows, 0.01, kl_coef), rel=1e-12)


@pytest.mark.parametrize("kl", ["gaussian", "flow_grpo", "velocity"])
def test_gradient_equals_finite_differences(kl: Any) -> None:
    rows, algorithm = batch(LinearPolicy(0.5)), GRPO(clip_range=0.5, kl_coef=0.3, kl=kl)
    policy = LinearPolicy(0.55)
    loss_of(policy, rows, algorithm).backward()
    step = 1e-6
    high, low = (loss_of(LinearPolicy(0.55 + sign * step), rows, algorithm).item() for sign in (1, -1))
    assert float(policy.scale.grad) == pytest.approx((high - low) / (2 * step), rel=1e-6)


def test_on_policy_ratio_is_exactly_one_and_the_gradient_is_the_policy_gradient() -> None:
    behavior = LinearPolicy(0.5)
    rows, policy = batch(behavior), LinearPolicy(0.5)
    models = Models(trainable=policy, kernel=FlowSDE(0.7))  # type: ignore[arg-type]
    result = GRPO().loss(rows, models)
    assert result.metrics["ratio"].tolist() == [1.0] * ROWS
    assert result.metrics["approx_kl"].tolist() == [0.0] * ROWS
    (gradient,) = torch.autograd.grad(result.loss.mean(), policy.scale)
    step = FlowSDE(0.7).step(rows.latents, policy.velocity(rows.latents, rows.grid.sigma, None), rows.grid)
    plain = -(rows.advantages * step.log_prob(rows.next_latents)).mean()
    torch.testing.assert_close(gradient, torch.autograd.grad(plain, policy.scale)[0])


def test_clipped_rows_have_no_gradient() -> None:
    rows = batch(LinearPolicy(0.5))
    policy = LinearPolicy(0.9)
    models = Models(trainable=policy, kernel=FlowSDE(0.7))  # type: ignore[arg-type]
    result = GRPO(clip_range=1e-6).loss(rows, models)
    ratio = result.metrics["ratio"]
    outside = ((ratio > 1) & (rows.advantages > 0)) | ((ratio < 1) & (rows.advantages < 0))
    assert bool(outside.any())
    (gradient,) = torch.autograd.grad(result.loss[outside].sum(), policy.scale)
    assert float(gradient) == 0.0
    assert result.metrics["clip_high"].sum() + result.metrics["clip_low"].sum() == ROWS


def test_kl_needs_the_reference_and_all_rows() -> None:
    assert not GRPO().requires.reference
    with_kl = GRPO(kl_coef=0.1).requires
    assert with_kl.reference
    assert with_kl.zero_advantages
