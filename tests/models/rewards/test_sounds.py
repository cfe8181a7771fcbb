"""Rewards of sound: levels by hand, CLAP next to plain transformers, and sounds at another rate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import ClapModel, ClapProcessor

from flowmill.configs.errors import ConfigError
from flowmill.models.rewards.factory import make_reward
from flowmill.models.rewards.loudness import Loudness
from flowmill.storage.trajectories.media import Sound
from tests.support.clap import write_clap


def tone(hertz: float, rate: int, seconds: float = 1.0, level: float = 0.5) -> np.ndarray:
    """Return a sine, (N, 2), the right channel half as loud."""
    wave = level * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)
    return np.stack([wave, wave / 2], 1)


def test_levels_by_hand() -> None:
    silence, half = np.zeros((100, 2)), np.full((100, 2), 0.5)
    cut = np.where(np.arange(100)[:, None] < 25, 1.0, 0.0).repeat(2, 1)
    media = np.stack([silence, half, cut]).astype(np.float32)
    found = Loudness(floor=-60.0).score(media, ["x"] * 3, [{}] * 3)
    # 20 log10(1/2), and 10 log10(1/4).
    np.testing.assert_allclose(found.values, [-60.0, -6.0206, -6.0206], atol=1e-4)
    assert list(found.notes or []) == ["-60.0 dBFS, 0.0% cut", "-6.0 dBFS, 0.0% cut", "-6.0 dBFS, 25.0% cut"]
    np.testing.assert_allclose(Loudness(target=-10.0).score(media, [], []).values, [-70.0, -3.9794, -3.9794], atol=1e-4)


@pytest.mark.parametrize("options", [{"floor": 0.0}, {"target": 1.0}, {"target": -90.0}])
def test_levels_that_are_none(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="it must be floor <= target <= 0"):
        make_reward("loudness", options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_clap(tmp_path_factory.mktemp("clap"))


def test_clap_is_the_cosine_of_plain_transformers(folder: str) -> None:
    reward: Any = make_reward("clap", {"model": folder})
    media = np.stack([tone(hertz, 48_000) for hertz in (200, 900, 4000)]).astype(np.float32)
    prompts = ["a dog", "a cat", "a sign that says 7"]
    model, processor = ClapModel.from_pretrained(folder).eval(), ClapProcessor.from_pretrained(folder)
    heard = processor.feature_extractor(list(media.mean(2)), sampling_rate=48_000, return_tensors="pt")
    read = processor.tokenizer(prompts, padding=True, return_tensors="pt")
    with torch.no_grad():
        both = model(**heard, **read)
    expected = (both.audio_embeds * both.text_embeds).sum(-1)
    torch.testing.assert_close(torch.from_numpy(reward.score(media, prompts, [{}] * 3).values), expected)


def test_what_is_longer_than_clap_hears_is_heard_in_pieces(folder: str) -> None:
    reward: Any = make_reward("clap", {"model": folder})
    first, second = (tone(hertz, 48_000).astype(np.float32)[None] for hertz in (300, 3000))
    both = reward.of_sounds(np.concatenate([first, second], 1))
    mean = reward.of_sounds(first) + reward.of_sounds(second)
    torch.testing.assert_close(both, mean / mean.norm(dim=-1, keepdim=True))
    assert torch.equal(both, reward.of_sounds(np.concatenate([first, second], 1)))


def test_a_model_that_fuses_parts_scores_a_sound_alike_in_every_call(tmp_path: Path) -> None:
    reward: Any = make_reward("clap", {"model": write_clap(tmp_path, fused=True)})
    media = np.stack([tone(hertz, 48_000) for hertz in (200, 900, 4000)]).astype(np.float32)
    first = reward.of_sounds(media)
    for row in range(3):
        torch.testing.assert_close(reward.of_sounds(media[row : row + 1])[0], first[row])
    assert all(torch.equal(reward.of_sounds(media), first) for _ in range(5))


def test_a_sound_at_another_rate_is_the_same_sound() -> None:
    sound = Sound(samples=(tone(440, 16_000) * 32767).round().astype(np.int16), rate=16_000)
    assert sound.at(16_000) is sound
    other = sound.at(48_000)
    assert (other.rate, other.samples.dtype, other.samples.shape[1]) == (48_000, np.int16, 2)
    assert abs(len(other.samples) - 48_000) < 100
    # Within, away from the ends where a filter has nothing before or after it.
    wanted = tone(440, 48_000) * 32767
    inner = slice(2000, 44_000)
    shift = min(range(-40, 41), key=lambda by: np.abs(np.roll(wanted, by, 0)[inner] - other.samples[inner]).max())
    assert np.abs(np.roll(wanted, shift, 0)[inner] - other.samples[inner]).max() < 200


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"reward 'clap': '.*nowhere' cannot be loaded"):
        make_reward("clap", {"model": str(tmp_path / "nowhere")})
