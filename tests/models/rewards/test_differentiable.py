"""Rewards that can be followed back: their numbers are those of ``score``, their gradients those of differences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import CLIPImageProcessor

from flowmill.models.quickstart.corpus import digit_pairs
from flowmill.models.rewards import REWARDS
from flowmill.models.rewards.differentiable import is_differentiable, processed
from flowmill.models.rewards.factory import make_reward
from tests.support.clip import write_clip, write_head, write_latent_head
from tests.support.judged import write_fitted
from tests.support.published_rewards import write_dina, write_image_reward, write_open_clip

PROMPTS = ['"17"', '"40"', '"93"']
FOLLOWED = {
    "aesthetic",
    "clip_score",
    "digits_network",
    "dina_lrm",
    "fitted",
    "hpsv2",
    "image_similarity",
    "imagereward",
    "latent_head",
    "pickscore",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rewards")
    write_clip(path)
    write_head(path / "head.safetensors")
    write_latent_head(path / "latent.safetensors")
    write_open_clip(path, path / "HPS.safetensors")
    write_fitted(path / "fitted")
    for name in ("blip", "dina"):
        (path / name).mkdir()
    write_image_reward(path / "blip")
    Image.fromarray(pictures()[0]).save(path / "wanted.png")
    return path


@pytest.fixture(scope="module")
def options(folder: Path, tiny_base: Path) -> dict[str, dict[str, Any]]:
    model = {"model": str(folder)}
    return {
        "aesthetic": {**model, "head": str(folder / "head.safetensors")},
        "clip_score": {**model, "convention": "flow_grpo"},
        "dina_lrm": {
            **write_dina(folder / "dina", tiny_base),
            "taps": (1,),
            "dtype": "float32",
            "max_sequence_length": 1,
        },
        "fitted": {"path": str(folder / "fitted")},
        "hpsv2": {"weights": str(folder / "HPS.safetensors"), "convention": "percent", **model},
        "image_similarity": {**model, "folder": str(folder)},
        "imagereward": {"weights": str(folder / "blip" / "ImageReward.safetensors"), "tokenizer": str(folder / "blip")},
        "latent_head": {"head": str(folder / "latent.safetensors")},
        "pickscore": {**model, "processor": str(folder)},
    }


def pictures(size: tuple[int, int] = (16, 32)) -> np.ndarray:
    _, gray = digit_pairs(3, seed=3)
    large = [np.asarray(Image.fromarray(each).resize((size[1], size[0]))) for each in gray]
    return np.repeat(np.stack(large)[..., None], 3, -1)


def smooth(images: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255


def given(name: str) -> tuple[np.ndarray, torch.Tensor]:
    if name in ("latent_head", "dina_lrm"):
        latents = np.random.default_rng(0).standard_normal((3, 4, 8, 8), np.float32)
        return latents, torch.from_numpy(latents)
    # 30 pixels are what the tiny models look at, so nothing is resized and the two must agree to the last digits.
    images = pictures((16, 32) if name == "digits_network" else (30, 30))
    return images, smooth(images)


def test_those_that_declare_it() -> None:
    from flowmill.configs.registry import resolve

    assert {name for name in REWARDS if is_differentiable(resolve(REWARDS, name, label="reward"))} == FOLLOWED


@pytest.mark.parametrize("name", sorted(FOLLOWED))
def test_it_is_the_score_with_its_gradient(options: dict[str, dict[str, Any]], name: str) -> None:
    reward = make_reward(name, options.get(name, {}))
    media, floats = given(name)
    metadata = [{"image": "wanted.png"}] * 3
    expected = reward.score(media, PROMPTS, metadata).values
    wanted = floats.clone().requires_grad_(True)
    values = reward.differentiable(wanted, PROMPTS, metadata)
    np.testing.assert_allclose(values.detach().numpy(), expected, rtol=1e-4, atol=1e-5)
    (slope,) = torch.autograd.grad(values.sum(), wanted)
    assert torch.isfinite(slope).all()
    assert (slope.flatten(1).norm(dim=1) > 0).all()
    # Along its own gradient a score rises by what the gradient says, row by row.
    with torch.no_grad():
        length = slope.flatten(1).norm(dim=1)
        step = 1e-2 * slope / length.reshape(-1, 1, 1, 1)
        up, down = (reward.differentiable(floats + sign * step, PROMPTS, metadata) for sign in (1, -1))
    torch.testing.assert_close((up - down) / 2e-2, length, rtol=0.05, atol=1e-4)


@pytest.mark.parametrize("shape", [(64, 48), (37, 91), (30, 30), (21, 25)])
def test_images_are_processed_as_the_processor_does(shape: tuple[int, int]) -> None:
    processor = CLIPImageProcessor(size={"shortest_edge": 30}, crop_size={"height": 30, "width": 30})
    # So far from black and white that nothing overshoots them, which Pillow would cut.
    images = np.random.default_rng(0).integers(80, 176, (2, *shape, 3), np.uint8)
    ours = processed(smooth(images), processor)
    theirs = processor(list(images), return_tensors="pt")["pixel_values"]
    if shape == (30, 30):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
        return
    # Pillow rounds to 8 bits after each of two directions.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2.5 / 255 / 0.26)
    assert (ours - theirs).abs().mean() < 0.5 / 255 / 0.26


def test_what_is_bright_beyond_white_has_a_gradient() -> None:
    reward = make_reward("digits_network", {})
    images = (smooth(pictures()) * 1.5).requires_grad_(True)
    (slope,) = torch.autograd.grad(reward.differentiable(images, PROMPTS, [{}] * 3).sum(), images)
    assert (slope[images > 1] != 0).any()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"resample": 2}, "resizes by method 2"),
        ({"rescale_factor": 1.0}, "scales pixels by 1.0"),
        ({"crop_size": {"height": 60, "width": 30}}, "cuts 60 x 30 pixels out of 30 x 30"),
    ],
)
def test_what_is_not_followed_is_refused(settings: dict[str, Any], says: str) -> None:
    processor = CLIPImageProcessor(
        **{"size": {"shortest_edge": 30}, "crop_size": {"height": 30, "width": 30}, **settings}
    )
    with pytest.raises(ValueError, match=says):
        processed(torch.zeros(1, 3, 48, 48), processor)


def test_the_network_reads_digits_and_is_the_same_every_time() -> None:
    texts, gray = digit_pairs(200, seed=5)
    images = np.repeat(gray[..., None], 3, -1)
    found = [make_reward("digits_network", {}).score(images, [f'"{text}"' for text in texts], [{}] * 200) for _ in "ab"]
    np.testing.assert_array_equal(found[0].values, found[1].values)
    assert np.mean([note == text for note, text in zip(found[0].notes, texts, strict=True)]) > 0.95
