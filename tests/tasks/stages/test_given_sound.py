"""Given clips with sound: both are encoded by the model's own autoencoders, and trained on."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import yaml
from diffusers import LTX2Pipeline

from flowmill.configs.errors import ConfigError, DataError
from flowmill.configs.load import load_config
from flowmill.configs.schema import RunConfig
from flowmill.models.policies.diffusion import DiffusionPolicy
from flowmill.storage.trajectories.media import MediaFormat, Sound
from flowmill.tasks.inputs.store_trust import remember
from flowmill.tasks.metrics.samples import shards_of
from flowmill.tasks.metrics.view import RunView
from flowmill.tasks.modalities.diffusion.data_media import DataMedia
from flowmill.tasks.specs.graph import Node
from tests.conftest import ROOT
from tests.support.given import only_batch, picture, write_jsonl
from tests.support.inside import Make, evaluate, prepare, run_epoch, run_stage, updates_of

SFT = {"name": "sft", "options": {"times": {"count": 2}}}


def clip(seed: int, frames: int = 12) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (frames, 64, 64, 3), np.uint8)


def sound(seed: int, seconds: float = 0.5, rate: int = 16000, channels: int = 2) -> Sound:
    """Return noise of which every second is louder than the one before."""
    rng, count = np.random.default_rng(seed), int(seconds * rate)
    grows = np.linspace(0.1, 0.9, count)[:, None] * rng.uniform(-32767, 32767, (count, channels))
    return Sound(samples=grows.astype(np.int16), rate=rate)


@pytest.fixture
def given(tmp_path: Path) -> Make:
    """Returns the config of a tiny family that trains on films, each a row, or on rows that name them."""

    def make(films: dict[str, bytes], preset: str = "tiny_ltx2", algorithm: Any = SFT, **section: Any) -> RunConfig:
        for name, data in films.items():
            (tmp_path / f"{name}.mp4").write_bytes(data)
        rows = [{"prompt": f"a clip of {name}", "image": f"{name}.mp4"} for name in films]
        data = {"train": str(write_jsonl(tmp_path, rows)), **section}
        about = {
            "extends": str(ROOT / "configs" / f"{preset}.yaml"),
            "store": {"root": str(tmp_path / "store")},
            "model": {"lora": None, "guidance_scale": 1.0},
            "prompts": {"train": None, "image": None},
            "data": data,
            "optimize": {"algorithm": algorithm, "updates_per_epoch": 1},
            "evaluate": {"samples": 2},
            "run": {"epochs": 1, "name": "films"},
        }
        (tmp_path / "films.yaml").write_text(yaml.safe_dump(about))
        config = load_config(tmp_path / "films.yaml")
        remember(config)
        return config

    return make


def slaney(rate: int, bins: int, size: int) -> np.ndarray:
    """Return Slaney's (bins, size / 2 + 1) filters, triangles with the area 1: a mel is 200 / 3 Hz up to 1000 Hz, then
    27 of them are a factor of 6.4."""
    mels = np.linspace(0, 15 + np.log(rate / 2 / 1000) / (np.log(6.4) / 27), bins + 2)
    hertz = np.where(mels < 15, mels * 200 / 3, 1000 * np.exp((mels - 15) * np.log(6.4) / 27))
    at = np.linspace(0, rate / 2, size // 2 + 1)
    low, mid, high = hertz[:-2, None], hertz[1:-1, None], hertz[2:, None]
    triangles = np.clip(np.minimum((at - low) / (mid - low), (high - at) / (high - mid)), 0, None)
    return np.asarray(triangles * 2 / (high - low))


def log_mel(samples: np.ndarray) -> torch.Tensor:
    """Return the (1, 2, T, 32) log-mel spectrogram of (N, 2) int16 samples at 16 kHz, 160 samples per step."""
    waves = torch.from_numpy(samples.T / 32768)
    window = torch.hann_window(1024, dtype=torch.float64)
    lines = torch.stft(waves, 1024, 160, window=window, pad_mode="reflect", return_complex=True).abs()
    mel = torch.from_numpy(slaney(16000, 32, 1024)) @ lines
    return mel.clamp(min=1e-5).log().transpose(1, 2)[None].float()


def test_clips_with_sound_are_trained_as_a_plain_loop_of_diffusers_does(given: Make) -> None:
    """The pipeline normalizes and packs what both autoencoders make of frames and spectrograms."""
    films = {str(n): (clip(n), sound(n)) for n in range(2)}
    config = given({name: MediaFormat(fps=24).encode(*film) for name, film in films.items()})
    context = prepare(config)
    (shard,) = shards_of(context.store, context.chain.ref(Node(0, "ingest")))
    # 9 frames at 24 a second are 9 latents of sound, of 640 samples each.
    for row, (frames, heard) in enumerate(films.values()):
        np.testing.assert_array_equal(shard.media(row), frames[:9])
        np.testing.assert_array_equal(shard.sound(row).samples, heard.samples[: 9 * 640])
    run_stage(context, "advantage", 1)
    trained = only_batch(context)
    pipeline = cast(Any, LTX2Pipeline.from_pretrained(context.base_folder))
    errors = []
    for row, (number, _) in enumerate(trained.keys):
        frames, heard = films[str(number)]
        noise, sigma = trained.noise[row : row + 1], trained.grid.sigma[row : row + 1]
        with torch.no_grad():
            found, mask, *_ = pipeline.encode_prompt(
                f"a clip of {number}", do_classifier_free_guidance=False, max_sequence_length=16
            )
            video, audio, mask = pipeline.connectors(found, mask, padding_side=pipeline.tokenizer.padding_side)
            pixels = torch.from_numpy(frames[:9]).permute(3, 0, 1, 2)[None] / 127.5 - 1
            seen = pipeline.prepare_latents(latents=pipeline.vae.encode(pixels).latent_dist.mode())
            latents = pipeline.audio_vae.encode(log_mel(heard.samples[: 9 * 640])).latent_dist.mode()
            sounds = pipeline.prepare_audio_latents(latents=latents[:, :, :9])
            clean = torch.cat([seen, sounds], 1)
            start = sigma * noise + (1 - sigma) * clean
            made = pipeline.transformer(
                hidden_states=start[:, :8],
                audio_hidden_states=start[:, 8:],
                encoder_hidden_states=video,
                audio_encoder_hidden_states=audio,
                timestep=sigma * 1000,
                sigma=sigma * 1000,
                encoder_attention_mask=mask,
                audio_encoder_attention_mask=mask,
                num_frames=2,
                height=2,
                width=2,
                fps=24.0,
                audio_num_frames=9,
                return_dict=False,
            )
        errors.append((torch.cat(made, 1) - (noise - clean)).square().mean().item())
    assert len(errors) == 2 * len(films)
    run_epoch(context, 1)
    (update,) = updates_of(context, 1)
    assert update["loss"] == pytest.approx(np.mean(errors), rel=1e-5)
    assert update["grad_norm"] > 0


def test_films_that_lack_a_sound_are_named_or_left_out(given: Make) -> None:
    form, frames, silence = MediaFormat(fps=24), clip(1), Sound(samples=np.zeros((8000, 2), np.int16), rate=16000)
    bad = {
        "mute": (form.encode(frames), "it has no sound, but model.policy 'ltx2' makes clips with sound"),
        "silent": (form.encode(frames, silence), "its sound is silent"),
        "short": (form.encode(frames, sound(1, 0.2)), "its sound ends after 0.20 of 0.36 seconds"),
        "brief": (form.encode(clip(2, 8), sound(1)), "has 8 frames at 24 per second, but model.frames is 9"),
        "broken": (form.encode(frames, sound(2))[:30_000], "cannot be read as an image or clip"),
    }
    # At other rates, longer than the clip, with one channel, and a moment shorter than the clip.
    good = {
        "other": MediaFormat(fps=30).encode(clip(3), sound(3, 5.0, 44100, 1)),
        "nearly": form.encode(clip(4), sound(4, 0.33)),
    }
    films = {name: data for name, (data, _) in bad.items()}
    with pytest.raises(DataError, match=r"(?s)line 1: mute.mp4: it has no sound.*Or set data.bad_rows to 'leave_out'"):
        prepare(given(films | good))
    config = given(films | good, bad_rows="leave_out")
    context = prepare(config)
    refused = RunView(context).ingested().refused  # type: ignore[union-attr]
    for (place, reason), (name, (_, message)) in zip(refused, bad.items(), strict=True):
        assert reason.startswith(f"{place}: {name}.mp4")
        assert message in reason
    (shard,) = shards_of(context.store, context.chain.ref(Node(0, "ingest")))
    other, nearly = (shard.sound(row).samples for row in range(2))
    assert other.shape == nearly.shape == (9 * 640, 2)
    np.testing.assert_array_equal(other[:, 0], other[:, 1])
    np.testing.assert_array_equal(other, sound(3, 5.0, 44100, 1).at(16000).samples[: 9 * 640].repeat(2, 1))
    np.testing.assert_array_equal(nearly[:5280], sound(4, 0.33).samples)
    assert not nearly[5280:].any()
    # Two samples of a pair are equal only if they also sound alike.
    one, louder = (DataMedia(frames, each) for each in (sound(1), sound(2)))
    assert one.same(DataMedia(frames.copy(), sound(1)))
    assert not one.same(louder)


def test_a_family_of_ones_own_that_cannot_encode_its_sound_says_so() -> None:
    made = SimpleNamespace(sound_rate=16000)
    with pytest.raises(ConfigError, match="no property 'sound_form' and no method 'encode_sounds'"):
        DiffusionPolicy.sound_form.fget(made)  # type: ignore[attr-defined]


@pytest.mark.campaign
@pytest.mark.parametrize("preset", ["tiny_ltx2", "tiny_ltx2_i2v"])
def test_every_family_with_sound_learns_from_pairs(given: Make, tmp_path: Path, preset: str) -> None:
    """Of which both look alike, and one sounds better."""
    frames, sources = clip(0, 124), []
    films = {str(n): MediaFormat(fps=24).encode(frames, sound(n, 5.2)) for n in range(4)}
    picture(1).save(tmp_path / "first.png")
    for n in range(2):
        row = {"prompt": f"film {n}", "chosen": f"{2 * n}.mp4", "rejected": f"{2 * n + 1}.mp4", "source": "first.png"}
        (tmp_path / f"pairs-{n}.jsonl").write_text(json.dumps(row) + "\n")
        sources.append(str(tmp_path / f"pairs-{n}.jsonl"))
    section = {"train": sources[0], "heldout": sources[1], "chosen": "chosen", "rejected": "rejected"}
    if preset == "tiny_ltx2_i2v":
        section["prompt_image"] = "source"
    dpo = {"name": "dpo", "options": {"times": {"count": 2}, "beta": 20}}
    context = prepare(given(films, preset, dpo, **section))
    run_epoch(context, 1)
    evaluate(context, 1)
    assert updates_of(context, 1)[0]["grad_norm"] > 0
    ((_, _, figures),) = RunView(context).summaries("validate")
    assert np.isfinite(figures["loss"])
