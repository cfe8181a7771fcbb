"""Advantages by modality: each trains its own log-prob, as if there were no other modality."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.registry import create
from models.maths.conditioning import Conditioning
from models.maths.transitions import Gaussian
from tasks.algorithms import ALGORITHMS
from tasks.algorithms.base import Algorithm
from tasks.algorithms.diffusion import Routed, TransitionBatch
from tests.support import toy

#: Loss, and one that takes the means of the steps, sums instead of means, or both.
ROUTING: Mapping[str, dict[str, Any]] = {
    "grpo": {"clip_range": 0.05},
    "grpo ": {"clip_range": 0.4, "from_means": True, "reduce": "sum"},
    "grpo_guard": {"clip_range": 0.01},
    "tempflow": {"clip_range": 0.05, "surrogate": "spo"},
    "flash_grpo": {"clip_range": 0.05},
}
SIZES = (1, 1)
ADVANTAGES = [[1.0, -0.5], [-2.0, 0.0], [0.5, 3.0], [0.0, -1.0]]


class TwoFold(toy.Toy):
    """A toy whose rows have two modalities, one after the other along the first latent dim."""

    def modalities(self) -> Mapping[str, int]:
        return {"seen": 1, "heard": 1}


def made(name: str) -> Algorithm:
    algorithm: Algorithm = create(ALGORITHMS, name.strip(), ROUTING[name], label="algorithm")
    return algorithm


def batch() -> TransitionBatch:
    """Return rows of another policy with an advantage for each modality."""
    plain = toy.transitions([0.0] * 4, toy.vector(toy.BEHAVIOR))
    assert plain.old_means is not None
    step = Gaussian(plain.old_means, models(plain).step(plain, torch.zeros_like(plain.latents)).std)
    old = step.log_probs(plain.next_latents, SIZES)
    return dataclasses.replace(plain, routed=Routed(advantages=torch.tensor(ADVANTAGES).double(), old_log_probs=old))


def models(rows: TransitionBatch) -> Any:
    return toy.models_of(TwoFold(toy.vector(toy.START), toy.vector(toy.REFERENCE)))


def alone(rows: TransitionBatch, number: int) -> TransitionBatch:
    """Return what rows would be if they had one modality."""
    assert rows.routed is not None
    assert rows.old_means is not None
    own = slice(number, number + 1)
    return dataclasses.replace(
        rows,
        latents=rows.latents[:, own],
        next_latents=rows.next_latents[:, own],
        old_means=rows.old_means[:, own],
        old_log_probs=rows.routed.old_log_probs[:, number],
        advantages=rows.routed.advantages[:, number],
        routed=None,
    )


@pytest.mark.parametrize("name", ROUTING)
def test_the_loss_is_the_mean_of_those_of_modalities_alone(name: str) -> None:
    rows, algorithm = batch(), made(name)
    found, gradients = [], []
    for each in (rows, alone(rows, 0), alone(rows, 1)):
        policy = models(each)
        loss = algorithm.loss(each, policy).loss
        found.append(loss.detach())
        gradients.append(torch.autograd.grad(loss.sum(), policy.trainable.theta)[0])
    torch.testing.assert_close(found[0], (found[1] + found[2]) / 2)
    torch.testing.assert_close(gradients[0], (gradients[1] + gradients[2]) / 2)
    assert not torch.allclose(gradients[1], gradients[2])


class Free:
    """A policy whose velocities are its parameters, so that gradients say which of them a loss moves."""

    def __init__(self, like: Tensor) -> None:
        self.theta, self.policy = (0.1 * like).clone().requires_grad_(), self

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        return self.theta

    def modalities(self) -> Mapping[str, int]:
        return {"seen": 1, "heard": 1}


@pytest.mark.parametrize("name", ROUTING)
def test_an_advantage_moves_nothing_of_the_other_modality(name: str) -> None:
    rows = batch()
    assert rows.routed is not None
    one = torch.stack([torch.tensor([1.0, -1.0, 2.0, 0.5]).double(), torch.zeros(4).double()], 1)
    free = Free(rows.latents)
    routed = dataclasses.replace(rows, routed=dataclasses.replace(rows.routed, advantages=one))
    wide = dict(ROUTING[name], clip_range=0.9)
    algorithm: Algorithm = create(ALGORITHMS, name.strip(), wide, label="algorithm")
    loss = algorithm.loss(routed, toy.models_of(free)).loss  # type: ignore[arg-type]
    (slope,) = torch.autograd.grad(loss.sum(), free.theta)
    assert (slope[:, 0] != 0).all()
    assert not slope[:, 1].any()


@pytest.mark.parametrize("name", ROUTING)
def test_ratios_of_the_policys_own_rows_are_exactly_one(name: str) -> None:
    rows = dataclasses.replace(batch(), own=torch.ones(4, dtype=torch.bool))
    metrics = made(name).loss(rows, models(rows)).metrics
    assert torch.equal(metrics["ratio"], torch.ones(4).double())
    # What the rollout stored was another policy's.
    assert (metrics["gap"] > 0).all()


def test_log_probs_of_parts_are_those_of_independent_normals() -> None:
    mean, std = torch.randn(3, 5, 2, dtype=torch.float64), torch.tensor([0.3, 0.5, 0.9]).double()
    value = torch.randn(3, 5, 2, dtype=torch.float64)
    found = Gaussian(mean, std).log_probs(value, (2, 3))
    terms = torch.distributions.Normal(mean, std.reshape(3, 1, 1)).log_prob(value)
    expected = torch.stack([terms[:, :2].mean((1, 2)), terms[:, 2:].mean((1, 2))], 1)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close((2 * found[:, 0] + 3 * found[:, 1]) / 5, Gaussian(mean, std).log_prob(value))
