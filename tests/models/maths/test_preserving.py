"""Predictions of models of a variance-preserving schedule, as velocities of a flow and in training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler
from torch import Tensor

from flowmill.models.maths.guidance import rescaled_guided
from flowmill.models.maths.kernels import FlowDDIM
from flowmill.models.maths.preserving import PREDICTIONS, Preserving, flow_length, flow_sigma
from flowmill.models.maths.sampling import replay
from flowmill.models.maths.transitions import Grid, expand, predictions

SCHEDULE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "clip_sample": False}
ENDS_IN_NOISE = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}


def drawn(number: int) -> Tensor:
    return torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def said(kind: str, clean: Tensor, noise: Tensor, alpha: Tensor) -> Tensor:
    a, b = expand(alpha.sqrt(), clean), expand((1 - alpha).sqrt(), clean)
    return {"epsilon": noise, "sample": clean, "v_prediction": a * noise - b * clean}[kind]


@pytest.mark.parametrize("kind", sorted(PREDICTIONS))
def test_what_is_predicted_is_the_velocity_and_back(kind: str) -> None:
    alpha = torch.tensor([0.97, 0.4, 0.01 if kind == "epsilon" else 0.0], dtype=torch.float64)
    clean, noise, sigma = drawn(0), drawn(1), flow_sigma(alpha)
    latents = (1 - expand(sigma, clean)) * clean + expand(sigma, clean) * noise
    at = Preserving.of(latents, alpha)
    noisy = expand(alpha.sqrt(), clean) * clean + expand((1 - alpha).sqrt(), clean) * noise
    torch.testing.assert_close(at.noisy, noisy)
    torch.testing.assert_close(noisy * expand(flow_length(sigma), noisy), latents)
    predicted = said(kind, clean, noise, alpha)
    velocity = PREDICTIONS[kind].velocity(predicted, at)
    torch.testing.assert_close(velocity, noise - clean)
    torch.testing.assert_close(PREDICTIONS[kind].predicted(latents, velocity, sigma, at), predicted)
    torch.testing.assert_close(predictions(latents, velocity, sigma)[0], clean)


@pytest.mark.parametrize("eta", [0.4, 1.0])
@pytest.mark.parametrize(("kind", "more"), [(k, {}) for k in PREDICTIONS] + [("v_prediction", ENDS_IN_NOISE)])
def test_the_step_is_that_of_diffusers_and_its_log_prob_that_of_ddpo(kind: str, more: Any, eta: float) -> None:
    scheduler = DDIMScheduler(**SCHEDULE, prediction_type=kind, set_alpha_to_one=False, **more)
    scheduler.set_timesteps(4)
    for step, time in enumerate(scheduler.timesteps[:-1]):
        here, there = scheduler.alphas_cumprod[scheduler.timesteps[step : step + 2]].double()
        noisy, predicted, noise = drawn(2), drawn(3), drawn(4)
        mean = scheduler.step(predicted, time, noisy, eta=eta, variance_noise=torch.zeros_like(noise)).prev_sample
        after = scheduler.step(predicted, time, noisy, eta=eta, variance_noise=noise).prev_sample
        std = eta * scheduler._get_variance(time, scheduler.timesteps[step + 1]) ** 0.5
        sigmas = flow_sigma(torch.stack([here, there])).expand(3, 2).T
        latents, following = (x * expand(flow_length(s), x) for x, s in zip((noisy, after), sigmas, strict=True))
        velocity = PREDICTIONS[kind].velocity(predicted, Preserving.of(latents, here.expand(3)))
        ours, log_prob = replay(FlowDDIM(eta=eta), latents, velocity, following, Grid(sigmas[0], sigmas[1], sigmas[1]))
        length = expand(flow_length(sigmas[1]), noisy)
        torch.testing.assert_close(ours.mean, mean * length, rtol=1e-5, atol=1e-5)
        theirs = torch.distributions.Normal(mean, std).log_prob(after).flatten(1).mean(1)
        # The density of the flow latents: of the others, less the log of the factor between them.
        torch.testing.assert_close(log_prob, theirs - flow_length(sigmas[1]).log(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", sorted(PREDICTIONS))
def test_the_gradient_of_a_log_prob_is_that_of_finite_differences(kind: str) -> None:
    alpha = torch.tensor([0.9, 0.3, 0.02], dtype=torch.float64)
    sigma = flow_sigma(alpha)
    grid = Grid(sigma, sigma * 0.8, sigma * 0.8)
    latents, following = drawn(5), drawn(6)

    def log_prob(predicted: Tensor) -> Tensor:
        velocity = PREDICTIONS[kind].velocity(predicted, Preserving.of(latents, alpha))
        return replay(FlowDDIM(eta=1.0), latents, velocity, following, grid)[1]

    assert torch.autograd.gradcheck(log_prob, drawn(7).requires_grad_())


def test_guidance_is_rescaled_to_the_std_of_the_conditional_prediction() -> None:
    from diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion import rescale_noise_cfg

    negative, positive = drawn(8), drawn(9)
    whole = rescaled_guided(negative, positive, 7.5, 1.0)
    torch.testing.assert_close(whole.flatten(1).std(1), positive.flatten(1).std(1))
    combined = negative + 7.5 * (positive - negative)
    assert torch.equal(rescaled_guided(negative, positive, 7.5, 0.7), rescale_noise_cfg(combined, positive, 0.7))
