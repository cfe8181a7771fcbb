"""MiniMax-H3 alone has two schedules, sound and clips of seconds, and no guidance at all."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import ModularPipeline
from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3PrepareLayoutStep
from PIL import Image

from configs.errors import ConfigError
from models.library_loading import quiet_libraries
from models.maths.conditioning import Conditioning
from models.maths.sampling import Sampler, ode_plan, sample
from models.maths.solvers import Euler
from models.maths.transitions import ODE
from models.policies.diffusion import DiffusionSettings
from models.policies.minimax_h3 import _LAYOUTS, MiniMaxH3
from models.policies.minimax_h3_fl2v import MiniMaxH3Frames
from models.policies.parts import Part
from models.policies.pipeline_index import MODULAR
from models.quickstart.tiny import build_tiny
from tasks.export.files import write_pipeline

PROMPTS = ["a red cube", "two cats and a dog in the photo"]
ALL = frozenset(Part)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    quiet_libraries()
    path = tmp_path_factory.mktemp("minimax_h3")
    build_tiny("minimax_h3").save_pretrained(path)
    return path


def load(folder: Path, parts: frozenset[Part] = ALL, **settings: Any) -> MiniMaxH3:
    size = DiffusionSettings(**{"height": 32, "width": 64, "frames": 124, **settings})
    made = MiniMaxH3.load(folder, size, parts, {"max_sequence_length": 64})
    assert isinstance(made, MiniMaxH3)
    return made


def test_an_export_draws_and_sounds_in_the_plain_pipeline_as_here(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "base")
    # Other shifts than the class's own, and another ratio of the two.
    for part, shift in (("scheduler", 7.0), ("audio_scheduler", 2.0)):
        file = tmp_path / "base" / part / "scheduler_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "shift": shift}))
    policy = load(tmp_path / "base")
    with torch.no_grad():
        policy.pipeline.transformer.proj_out.weight.mul_(1.5)
    write_pipeline(policy, tmp_path / "base", tmp_path / "export")
    pipeline = ModularPipeline.from_pretrained(str(tmp_path / "export"))
    pipeline.load_components()
    # Where torchvision is, it is loaded too.
    pipeline.update_components(**MiniMaxH3.components(tmp_path / "export", ALL))
    pipeline.set_progress_bar_config(disable=True)
    # 124 frames are 37 of latents, of 2 x 4, and 207 of sound in each channel.
    assert policy.modalities() == {"video": 4 * 37 * 2 * 4, "audio": 2 * 207 * 8}
    start = policy.initial_latents([torch.Generator().manual_seed(row) for row in range(2)])
    sampler, plans = Sampler(kernel=ODE(), solver=Euler()), [ode_plan()] * 2

    def no_noise(step: int) -> torch.Tensor:
        raise AssertionError("the ODE needs no noise")

    conditioning, sigmas = Conditioning(policy.encode(PROMPTS)), policy.sigmas(3)
    final = sample(policy, conditioning, start, sigmas, sampler=sampler, plans=plans, noise=no_noise).final
    heard, drawn, call = policy.sounds(final), policy.decode(final), policy.pipeline_call(3, None)
    assert (policy.sound_rate, heard.dtype, tuple(heard.shape)) == (32000, torch.int16, (2, 207 * 800, 2))
    for row, prompt in enumerate(PROMPTS):
        generator = torch.Generator().manual_seed(row)
        made = pipeline(prompt=prompt, generator=generator, output_type="pt", **call.arguments)
        torch.testing.assert_close(policy.clip_latents(final)[row], made.latents[0], rtol=0, atol=5e-6)
        torch.testing.assert_close(policy.sound_latents(final)[row], made.audio_latents, rtol=0, atol=5e-6)
        assert (drawn[row] - (made.videos[0].permute(0, 2, 3, 1) * 255).round()).abs().max() <= 1
        assert (heard[row] - (made.audio[0].clamp(-1, 1) * 32767).round().T).abs().max() <= 8
        assert (made.sampling_rate, float(made.audio.std()) > 0.01) == (32000, True)


def test_both_media_move_both(folder: Path) -> None:
    policy = load(folder)
    conditioning, sigma = Conditioning(policy.encode(PROMPTS[:1])), torch.tensor([0.9])
    start = policy.initial_latents([torch.Generator().manual_seed(0)])
    before = policy.apart(policy.velocity(start, sigma, conditioning))
    size, _ = policy.modalities().values()
    for changed in (slice(None, size), slice(size, None)):
        other = start.clone()
        other[:, changed] *= 1.1
        after = policy.apart(policy.velocity(other, sigma, conditioning))
        assert all(not torch.equal(one, two) for one, two in zip(before, after, strict=True))


def test_tokens_are_laid_out_once_for_the_steps_of_a_row(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And again for other lengths and sizes; old ones are let go."""
    made: list[int] = []
    build = MiniMaxH3PrepareLayoutStep.build_packed_sequence

    def counted(text: torch.Tensor, *about: Any) -> Any:
        made.append(len(text))
        return build(text, *about)

    monkeypatch.setattr(MiniMaxH3PrepareLayoutStep, "build_packed_sequence", staticmethod(counted))
    policy = load(folder)
    rows, start = policy.encode(PROMPTS), policy.initial_latents([torch.Generator().manual_seed(0)] * 2)
    for sigma in (0.9, 0.5):
        policy.velocity(start, torch.full((2,), sigma), Conditioning(rows))
    assert made == [int(length) for length in rows["text_length"]]
    cpu = torch.device("cpu")
    for length in range(20, 21 + _LAYOUTS):
        policy._layouts(length, policy._shape(), (), cpu)
    assert len(made) == 3 + _LAYOUTS
    policy._layouts(20, policy._shape(), (), cpu)
    policy.settings = replace(policy.settings, frames=141)
    policy._layouts(20, policy._shape(), (), cpu)
    policy.forget_tables()
    policy._layouts(20, policy._shape(), (), cpu)
    assert len(made) == 6 + _LAYOUTS


def test_guidance_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"guidance_scale is 4\.5, but guidance is in the weights of 'minimax_h3'"):
        load(folder, guidance_scale=4.5)


@pytest.mark.parametrize(
    ("frames", "nearest"), [(120, "124"), (125, "124 and 141"), (340, "328 and 345"), (362, "345")]
)
def test_clips_that_the_pipeline_would_round_or_refuse(folder: Path, frames: int, nearest: str) -> None:
    with pytest.raises(ConfigError, match=rf"17 n \+ 5 frames, 124 to 345 .* The nearest (is|are) {nearest}\."):
        load(folder, frames=frames)


def test_texts_that_cannot_be_read_are_refused(folder: Path) -> None:
    policy = load(folder, frozenset({Part.TEXT}))
    for prompt, expected in (("", "has 0 tokens"), ("red " * 80, "Raise it, or shorten the prompt")):
        with pytest.raises(ConfigError, match=expected):
            policy.encode([prompt])


@pytest.mark.parametrize(
    ("file", "change", "expected"),
    [
        (
            "text_encoder/config.json",
            {"text_config": {"num_hidden_layers": 50}},
            "has 50 layers, but the pipeline reads",
        ),
        (
            "vae/config.json",
            {"clip_length": 13},
            r"encodes 13 frames at a time, but 'minimax_h3' knows clips of 17 n \+",
        ),
        ("audio_scheduler/scheduler_config.json", None, "has no audio_scheduler/scheduler_config.json"),
        ("audio_scheduler/scheduler_config.json", {"shift": 0.0}, "can make no MiniMaxH3Scheduler of audio_scheduler/"),
        (MODULAR, {"audio_scheduler": ["diffusers", "DDIMScheduler", {}]}, "has the audio_scheduler DDIMScheduler"),
        (MODULAR, {"audio_vae": [None, None, {}]}, "has no folder 'audio_vae'|says of 'audio_vae'"),
        (MODULAR, {"audio_vae": ["diffusers", "AutoencoderKL", {}]}, "has the audio_vae AutoencoderKL, but"),
    ],
)
def test_folders_that_are_made_otherwise_are_refused(
    folder: Path, tmp_path: Path, file: str, change: dict[str, Any] | None, expected: str
) -> None:
    shutil.copytree(folder, tmp_path / "model")
    path = tmp_path / "model" / file
    if change is None:
        path.unlink()
    else:
        path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ConfigError, match=expected):
        load(tmp_path / "model")


def test_a_first_and_a_last_frame_are_those_of_the_pipeline(folder: Path) -> None:
    size = DiffusionSettings(height=32, width=64, frames=124)
    policy = MiniMaxH3Frames.load(folder, size, ALL, {"max_sequence_length": 64})
    draw = np.random.default_rng(0)
    first, last = (draw.integers(0, 256, (*sides, 3), dtype=np.uint8) for sides in ((40, 60), (70, 50)))
    rows = policy.encode(PROMPTS[:1] * 2, [[first, last], [first]])
    # Both have the same shape, and show two frames and one to the text encoder.
    blocks = [policy.given_frames({name: row[n : n + 1] for name, row in rows.items()})[0] for n in range(2)]
    assert [len(each) for each in blocks] == [2, 1]
    assert blocks[0][0] == blocks[1][0]
    start, sampler = policy.initial_latents([torch.Generator().manual_seed(0)]), Sampler(kernel=ODE(), solver=Euler())
    cond = Conditioning({name: row[:1] for name, row in rows.items()})
    ours = sample(
        policy, cond, start, policy.sigmas(2), sampler=sampler, plans=[ode_plan()], noise=lambda step: start
    ).final
    pipeline = policy.pipeline
    clip, sound = policy.clip_latents(start), policy._joined.own(policy.apart(start)[1], torch.ones(1))
    made = pipeline(
        prompt=PROMPTS[0],
        image=Image.fromarray(first),
        last_image=Image.fromarray(last),
        height=32,
        width=64,
        num_frames=124,
        num_inference_steps=3,
        latents=clip,
        audio_latents=sound.view(2, -1, policy._shape().sound[1]).transpose(1, 2),
        generator=torch.Generator().manual_seed(pipeline.keyframe_encode_seed),
        output_type="np",
    )
    torch.testing.assert_close(policy.clip_latents(ours), made.latents, rtol=0, atol=5e-6)
    torch.testing.assert_close(policy.sound_latents(ours)[0], made.audio_latents, rtol=0, atol=5e-6)
