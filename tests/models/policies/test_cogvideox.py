"""CogVideoX alone has DDIM on clips from pure noise, and two kinds of positions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import CogVideoXDDIMScheduler, CogVideoXPipeline

from flowmill.configs.errors import ConfigError
from flowmill.models.library_loading import quiet_libraries
from flowmill.models.maths.conditioning import Conditioning
from flowmill.models.maths.kernels import FlowDDIM
from flowmill.models.maths.preserving import PREDICTIONS, Preserving, flow_sigma
from flowmill.models.maths.sampling import Sampler, ode_plan, replay, sample
from flowmill.models.maths.solvers import Euler
from flowmill.models.maths.transitions import ODE, Grid, expand
from flowmill.models.policies.cogvideox import CogVideoX
from flowmill.models.policies.diffusion import DiffusionSettings
from flowmill.models.policies.parts import Part
from flowmill.models.quickstart.tiny import build_tiny

PROMPTS = ["a red cube", "two cats and a dog in the photo"]
PUBLISHED = {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny pipeline with the positions of 5B."""
    quiet_libraries()
    path = tmp_path_factory.mktemp("cogvideox")
    rotary = {"transformer": {"use_rotary_positional_embeddings": True}, "scheduler": {"snr_shift_scale": 1.0}}
    build_tiny("cogvideox", changes=rotary).save_pretrained(path)
    return path


def settings(**changed: Any) -> DiffusionSettings:
    return DiffusionSettings(**{"height": 32, "width": 64, "frames": 17, "guidance_scale": 6.0, **changed})


def no_noise(step: int) -> torch.Tensor:
    raise AssertionError("the ODE needs no noise")


def test_clips_of_rotary_positions_are_the_pipelines(folder: Path) -> None:
    policy = CogVideoX.load(folder, settings(), frozenset(Part), {"max_sequence_length": 16})
    start, sigmas = policy.initial_latents([torch.Generator().manual_seed(n) for n in range(2)]), policy.sigmas(4)
    assert (tuple(start.shape), float(sigmas[0]), float(sigmas[-1])) == ((2, 5, 16, 4, 8), 1.0, 0.0)
    conditioning = Conditioning(policy.encode(PROMPTS), policy.encode(["dull", "dull"]))
    sampler, plans = Sampler(kernel=ODE(), solver=Euler()), [ode_plan()] * 2
    final = sample(policy, conditioning, start, sigmas, sampler=sampler, plans=plans, noise=no_noise).final
    pipeline, call = CogVideoXPipeline.from_pretrained(folder), policy.pipeline_call(4, "dull")
    pipeline.set_progress_bar_config(disable=True)
    arguments = {**call.arguments, "negative_prompt": ["dull"] * 2, "output_type": "latent"}
    theirs = pipeline(PROMPTS, generator=[torch.Generator().manual_seed(n) for n in range(2)], **arguments).frames
    torch.testing.assert_close(final, theirs, rtol=0, atol=1e-5)
    assert theirs.abs().max() > 1
    assert policy.decode(final).shape == (2, 17, 32, 64, 3)


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_its_step_is_that_of_ddim_and_with_noise_its_variance(scale: float) -> None:
    """The published step is a_t x + b_t x0; the one with noise has DDIM's variance, which pure noise leaves finite."""
    scheduler = CogVideoXDDIMScheduler(**PUBLISHED, snr_shift_scale=scale)
    scheduler.set_timesteps(4)
    draw = torch.Generator().manual_seed(0)
    for step, time in enumerate(scheduler.timesteps[:-1].tolist()):
        here, there = scheduler.alphas_cumprod[scheduler.timesteps[step : step + 2]]
        noisy, predicted, drawn = torch.randn(3, 2, 3, 4, generator=draw, dtype=torch.float64)
        sigma, following = flow_sigma(here).expand(2), flow_sigma(there).expand(2)
        grid, alpha = Grid(sigma, following, following), here.expand(2)
        lengths = [expand(each.sqrt() + (1 - each).sqrt(), noisy) for each in (alpha, there.expand(2))]
        velocity = PREDICTIONS["v_prediction"].velocity(predicted, Preserving.of(noisy / lengths[0], alpha))
        after, clean = scheduler.step(predicted, time, noisy, return_dict=False)
        torch.testing.assert_close(ODE().step(noisy / lengths[0], velocity, grid).mean * lengths[1], after)
        # DDIM's own formulas (12) and (16), with eta 1: the noise that is kept has what the variance leaves.
        variance = scheduler._get_variance(time, int(scheduler.timesteps[step + 1]))
        noise = here.sqrt() * predicted + (1 - here).sqrt() * noisy
        mean = there.sqrt() * clean + (1 - there - variance).clamp(min=0).sqrt() * noise
        wanted = torch.distributions.Normal(mean / lengths[1], variance.sqrt() / lengths[1])
        value = (mean + variance.sqrt() * drawn) / lengths[1]
        found = replay(FlowDDIM(eta=1.0), noisy / lengths[0], velocity, value, grid)
        assert (step > 0) == (float(here) > 0)
        torch.testing.assert_close(found[1], wanted.log_prob(value).flatten(1).mean(1))


@pytest.mark.parametrize(
    ("changed", "options", "said"),
    [
        ({"patch_size_t": 2}, {}, "is a CogVideoX 1.5 .patch_size_t 2"),
        ({"use_rotary_positional_embeddings": False}, {"max_sequence_length": 64}, "positions for 226 tokens of text"),
    ],
)
def test_transformers_that_take_something_else_are_refused(
    folder: Path, changed: Mapping[str, Any], options: Mapping[str, Any], said: str, edited: Callable[..., None]
) -> None:
    edited(folder / "transformer" / "config.json", changed)
    with pytest.raises(ConfigError, match=said):
        CogVideoX.load(folder, settings(), frozenset({Part.TEXT}), options)


@pytest.fixture
def edited(folder: Path) -> Any:
    """Return what changes a file of the folder until the test is over."""
    before: dict[Path, str] = {}

    def change(path: Path, changed: Mapping[str, Any]) -> None:
        before[path] = path.read_text()
        path.write_text(json.dumps({**json.loads(before[path]), **changed}))

    yield change
    for path, text in before.items():
        path.write_text(text)


def test_latents_in_even_number_are_no_clips_that_it_can_make(folder: Path) -> None:
    pipeline = CogVideoXPipeline.from_pretrained(folder)
    frames = [pipeline.vae.decode(torch.zeros(1, 16, count, 4, 4)).sample.shape[2] for count in (1, 2, 3)]
    assert frames == [1, 8, 9]
    assert [count for count in range(18) if count in CogVideoX.lengths] == [1, 9, 17]
