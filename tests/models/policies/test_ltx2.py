"""Clips with sound alone have a second medium in the same chain."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import LTX2Pipeline
from diffusers.pipelines.ltx2 import LTX2VocoderWithBWE

from flowmill.configs.errors import ConfigError
from flowmill.models.maths.conditioning import Conditioning
from flowmill.models.maths.sampling import Sampler, ode_plan, sample
from flowmill.models.maths.solvers import Euler
from flowmill.models.maths.transitions import ODE
from flowmill.models.policies.diffusion import DiffusionSettings
from flowmill.models.policies.ltx2 import LTX2
from flowmill.models.policies.parts import Part
from flowmill.models.quickstart.tiny import build_tiny

PROMPTS = ["a red cube", "two cats and a dog in the photo"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ltx2")
    build_tiny("ltx2").save_pretrained(path)
    return path


def load(folder: Path, guidance_scale: float = 1.0, **options: Any) -> LTX2:
    settings = DiffusionSettings(height=64, width=64, frames=9, guidance_scale=guidance_scale)
    made = LTX2.load(folder, settings, frozenset(Part), {"max_sequence_length": 16, **options})
    assert isinstance(made, LTX2)
    return made


#: What LTX-2.3 has that LTX-2 has not: gates, modulation of text by the noise level, projections of text per medium.
_NEWER: dict[str, dict[str, Any]] = {
    "transformer": {
        **dict.fromkeys(("gated_attn", "audio_gated_attn", "cross_attn_mod", "audio_cross_attn_mod"), True),
        "perturbed_attn": True,
        "use_prompt_embeddings": False,
    },
    "connectors": {
        **dict.fromkeys(("per_modality_projections", "proj_bias", "video_gated_attn", "audio_gated_attn"), True),
        "video_hidden_dim": 24,
        "video_connector_attention_head_dim": 12,
        "audio_hidden_dim": 12,
        "audio_connector_attention_head_dim": 6,
    },
}


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny folder as LTX-2.3 is, whose vocoder makes 48 kHz of 16 kHz."""
    pipeline, path = build_tiny("ltx2", changes=_NEWER), tmp_path_factory.mktemp("ltx23")
    stages = {"hidden_channels": 16, "resnet_kernel_sizes": [3], "resnet_dilations": [[1, 3]]}
    stages |= {"upsample_kernel_sizes": [20, 32], "upsample_factors": [10, 16], "in_channels": 64}
    wider = {f"bwe_{name}": value for name, value in stages.items()}
    wider |= {"bwe_upsample_kernel_sizes": [24, 20], "bwe_upsample_factors": [12, 20], "bwe_in_channels": 128}
    pipeline.vocoder = LTX2VocoderWithBWE(**stages, **wider).eval()
    pipeline.save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("made", "rate"), [pytest.param("folder", 16000, marks=pytest.mark.campaign), ("newer", 48000)]
)
def test_both_media_are_the_pipelines_with_a_scale_of_guidance_each(
    made: str, rate: int, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(made)
    policy = load(folder, 3.0, audio_guidance_scale=7.0, guidance_rescale=0.7, frame_rate=12.0)
    conditioning = Conditioning(policy.encode(PROMPTS), policy.encode(["a sign"] * 2))
    start = policy.initial_latents([torch.Generator().manual_seed(row) for row in range(2)])
    # 9 frames are two of latents of 2 x 2, and at 12 a second 0.75 s of sound, of which a latent is 40 ms.
    assert [part.shape[1] for part in policy.apart(start)] == [8, 19]
    assert start.shape == (2, 27, 16)
    sampler, plans = Sampler(kernel=ODE(), solver=Euler()), [ode_plan()] * 2

    def no_noise(step: int) -> torch.Tensor:
        raise AssertionError("the ODE needs no noise")

    final = sample(policy, conditioning, start, policy.sigmas(4), sampler=sampler, plans=plans, noise=no_noise).final
    call = policy.pipeline_call(4, "a sign")
    assert call is not None
    assert call.heard
    pipeline = LTX2Pipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    arguments = {**call.arguments, "negative_prompt": ["a sign"] * 2}

    def run(output: str) -> Any:
        generators = [torch.Generator().manual_seed(row) for row in range(2)]
        return pipeline(prompt=PROMPTS, generator=generators, output_type=output, **arguments)

    drawn, latents = run("pt"), run("latent")
    torch.testing.assert_close(policy.clip_latents(final), latents.frames, rtol=0, atol=1e-5)
    torch.testing.assert_close(policy.sound_latents(final), latents.audio, rtol=0, atol=1e-5)
    assert policy.sound_rate == rate
    expected = (drawn.audio.clamp(-1, 1) * 32767).round().transpose(1, 2)
    heard = policy.sounds(final)
    assert (heard.dtype, tuple(heard.shape)) == (torch.int16, (2, 73 * rate // 100, 2))
    assert (heard - expected).abs().max() <= 2
    assert (policy.decode(final) - (drawn.frames.permute(0, 1, 3, 4, 2) * 255).round()).abs().max() <= 1
    # Each of the two scales and the rescaling changes its medium.
    plain = policy.velocity(start, torch.full((2,), 0.9), conditioning)
    other = load(folder, 3.0, audio_guidance_scale=3.0, guidance_rescale=0.7, frame_rate=12.0)
    (clip, sound), (clip_too, sound_too) = (
        policy.apart(each) for each in (plain, other.velocity(start, torch.full((2,), 0.9), conditioning))
    )
    assert torch.equal(clip, clip_too)
    assert not torch.equal(sound, sound_too)


def test_guidance_of_sound_alone_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"audio_guidance_scale is 7, but model.guidance_scale is 1, which turns"):
        load(folder, audio_guidance_scale=7.0)


def test_text_that_the_registers_do_not_divide_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"is 20, but the connectors of .* take multiples of 8. Set it to 16"):
        load(folder, max_sequence_length=20)


@pytest.mark.parametrize(
    ("part", "change", "expected"),
    [
        ("transformer", {"audio_in_channels": 8}, "clips are 16 wide and those of its sounds 8"),
        ("transformer", {"patch_size": 2}, "has tokens of several latents"),
        ("vae", {"timestep_conditioning": True}, "draws noise when it decodes"),
    ],
)
def test_folders_that_are_made_otherwise_are_refused(
    folder: Path, tmp_path: Path, part: str, change: dict[str, Any], expected: str
) -> None:
    copied = tmp_path / "model"
    shutil.copytree(folder, copied)
    file = copied / part / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ConfigError, match=expected):
        load(copied)


@pytest.mark.parametrize("bad", [{"frame_rate": 0.0}, {"guidance_rescale": 1.5}, {"audio_guidance_scale": 0.0}])
def test_options_that_cannot_work(folder: Path, bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        load(folder, **bad)
