"""Losses of given samples against values worked out one number at a time, in float64."""

from __future__ import annotations

import math

import pytest
import torch

from models.maths.preserving import flow_length, flow_sigma
from tasks.algorithms.objectives import kto_loss, prediction_weight

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
    given = torch.tensor([[gain], [advantage]], dtype=torch.float64)
    assert float(kto_loss(given[0], given[1], desired, undesired)) == pytest.approx(expected, rel=1e-12)


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
