"""Losses of given samples against values worked out one number at a time, in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from flowmill.models.maths.preserving import flow_length, flow_sigma
from flowmill.tasks.algorithms.dpo import DPO
from flowmill.tasks.algorithms.objectives import kto_loss, prediction_weight
from tests.golden.algorithms2026.rows import given, noised

KTO = [
    # gain, advantage, weights of desired and undesired samples, loss = w sigmoid(-sign gain)
    (0.0, 1.0, 1.0, 1.0, 0.5),
    (0.0, -0.3, 1.0, 2.0, 1.0),
    (math.log(3), 0.2, 1.0, 1.0, 0.25),
    (math.log(3), -1.0, 1.0, 1.0, 0.75),
    (-math.log(4), 1.0, 0.5, 1.0, 0.4),
    (7.0, 0.0, 1.0, 1.0, 0.0),
]


@pytest.mark.parametrize(("gain", "advantage", "desired", "undesired", "expected"), KTO)
def test_kto_by_hand(gain: float, advantage: float, desired: float, undesired: float, expected: float) -> None:
    row = torch.tensor([[gain], [advantage]], dtype=torch.float64)
    assert float(kto_loss(row[0], row[1], desired, undesired)) == pytest.approx(expected, rel=1e-12)


def test_kto_moves_desired_and_undesired_samples_apart_and_clear_cases_least() -> None:
    gain = torch.tensor([0.0, 4.0, 0.0, -4.0], dtype=torch.float64, requires_grad=True)
    kto_loss(gain, torch.tensor([1.0, 1.0, -1.0, -1.0]), 1.0, 1.0).sum().backward()
    assert gain.grad is not None
    assert gain.grad.sign().tolist() == [-1, -1, 1, 1]
    assert abs(gain.grad[1]) < abs(gain.grad[0])
    assert abs(gain.grad[3]) < abs(gain.grad[2])


@pytest.mark.parametrize("alpha_bar", [0.999, 0.7, 0.3, 0.01])
def test_weights_turn_the_error_of_velocities_into_that_of_each_prediction(alpha_bar: float) -> None:
    """Of noise, clean latents and v, computed from variance-preserving latents as diffusers' schedulers do."""
    a, b = math.sqrt(alpha_bar), math.sqrt(1 - alpha_bar)
    clean, noise, wrong = 0.8, -0.4, 0.37
    sigma = flow_sigma(torch.tensor(alpha_bar, dtype=torch.float64))
    flow = (1 - sigma) * clean + sigma * noise
    assert float(flow / flow_length(sigma)) == pytest.approx(a * clean + b * noise)
    velocity = noise - clean + wrong
    predicted_noise, predicted_clean = flow + (1 - sigma) * velocity, flow - sigma * velocity
    errors = {
        "velocity": wrong,
        "epsilon": predicted_noise - noise,
        "sample": predicted_clean - clean,
        "v_prediction": (a * predicted_noise - b * predicted_clean) - (a * noise - b * clean),
    }
    for prediction, error in errors.items():
        weight = prediction_weight(prediction, sigma[None])
        assert float(weight * wrong**2) == pytest.approx(float(error) ** 2, rel=1e-9), prediction


def diffusion_dpo(noise: np.ndarray, predicted: np.ndarray, base: np.ndarray, beta: float) -> float:
    """Diffusion-DPO's loss (arXiv 2311.12908, eq. 14), one pair after the other: predictions of noise at shared noise.

    -log sigmoid(-beta / 2 ((e_w - e_w,ref) - (e_l - e_l,ref))), e the mean squared error; the factor 1/2 and the mean
    are those of the public code, for which beta is stated. Rows (better, worse) of each pair, (P, 2, D).
    """
    total = 0.0
    for pair in range(len(noise)):
        gained = [
            np.mean((noise[pair] - predicted[pair, side]) ** 2) - np.mean((noise[pair] - base[pair, side]) ** 2)
            for side in (0, 1)
        ]
        total += math.log1p(math.exp(0.5 * beta * (gained[0] - gained[1])))
    return total / len(noise)


def test_dpo_is_diffusion_dpo_in_the_coordinates_of_stable_diffusion() -> None:
    """Loss and gradient, from noised latents and predictions of noise as a plain loop over a UNet has them."""
    draw, pairs, dims, beta = np.random.default_rng(0), 3, 4, 2.5
    alpha_bar = np.array([0.97, 0.5, 0.08])
    clean, noise = draw.normal(size=(pairs, 2, dims)), draw.normal(size=(pairs, dims))
    predicted, base = draw.normal(size=(2, pairs, 2, dims))
    sigma = flow_sigma(torch.from_numpy(alpha_bar)).repeat_interleave(2)
    column = sigma[:, None]
    rows = torch.from_numpy(clean).reshape(-1, dims)
    noises = torch.from_numpy(noise).repeat_interleave(2, 0)
    latents = (1 - column) * rows + column * noises

    def velocity(values: np.ndarray) -> torch.Tensor:
        """Of predicted noise: v = eps - x0 with x0 = (x - s eps) / (1 - s)."""
        eps = torch.from_numpy(values).reshape(-1, dims)
        return eps - (latents - column * eps) / (1 - column)

    won = torch.tensor([1.0, -1.0] * pairs, dtype=torch.float64)
    batch = noised(rows, noises, sigma, won, torch.arange(pairs).repeat_interleave(2))

    def ours(values: np.ndarray) -> tuple[float, torch.Tensor]:
        leaf = velocity(values).requires_grad_()
        loss = DPO(beta=beta, prediction="epsilon").loss(batch, given(leaf, leaf, velocity(base))).loss.mean()
        loss.backward()
        assert leaf.grad is not None
        # dv / deps = 1 / (1 - s)
        return float(loss.detach()), (leaf.grad / (1 - column)).reshape(pairs, 2, dims)

    loss, gradient = ours(predicted)
    assert loss == pytest.approx(diffusion_dpo(noise, predicted, base, beta), rel=1e-12)
    assert ours(base)[0] == pytest.approx(math.log(2), rel=1e-12)
    step = 1e-6
    for place in [(0, 0, 1), (1, 1, 2), (2, 0, 3), (2, 1, 0)]:
        near = [predicted.copy(), predicted.copy()]
        near[0][place] += step
        near[1][place] -= step
        high, low = (diffusion_dpo(noise, each, base, beta) for each in near)
        assert float(gradient[place]) == pytest.approx((high - low) / (2 * step), rel=1e-6)
