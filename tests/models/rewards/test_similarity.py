"""Likeness to the image that an edit was made of, without a model and with one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flowmill.configs.errors import ConfigError, RewardError
from flowmill.configs.rewards import RewardSection
from flowmill.models.rewards.base import Batch
from flowmill.models.rewards.factory import make_reward, needs_of, works_on_accelerator
from flowmill.models.rewards.invocation import score
from flowmill.models.rewards.similarity import pixel_similarity, structural_similarity
from tests.support.clip import write_clip


def flat(value: int, size: int = 16) -> np.ndarray:
    return np.full((size, size, 3), value, np.uint8)


def noise(seed: int, size: int = 16) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)


def likeness(media: list[np.ndarray], references: list[list[np.ndarray]], **options: Any) -> np.ndarray:
    reward = make_reward("image_similarity", {"to": "source", **options})
    about: list[dict[str, Any]] = [{}] * len(media)
    batch = Batch(media=np.stack(media), prompts=[""] * len(media), metadata=about, references=references)
    return np.asarray(score(reward, "image_similarity", batch).values)


def test_pixels_by_hand() -> None:
    assert pixel_similarity(flat(10), flat(10)) == 1.0
    assert pixel_similarity(flat(0), flat(255)) == 0.0
    half = flat(0)
    half[:8] = 255
    assert pixel_similarity(half, flat(0)) == pytest.approx(1 - np.sqrt(0.5))


def test_ssim_by_hand() -> None:
    """Of images without structure only the means are left of equation 13."""
    c1 = (0.01 * 255) ** 2
    assert structural_similarity(flat(50), flat(100)) == pytest.approx((2 * 5000 + c1) / (2500 + 10000 + c1))
    assert structural_similarity(noise(0), noise(0)) == pytest.approx(1.0)
    assert structural_similarity(noise(0), 255 - noise(0)) < -0.8
    with pytest.raises(ValueError, match="windows of 11 pixels, but images are 8 x 8"):
        structural_similarity(flat(0, 8), flat(0, 8))


def test_ssim_equals_a_slow_count_of_windows() -> None:
    one, other = (image @ np.array([0.299, 0.587, 0.114]) for image in (noise(1), noise(2)))
    away = np.arange(11) - 5
    weights = np.exp(-(away[:, None] ** 2 + away[None] ** 2) / (2 * 1.5**2))
    weights /= weights.sum()
    c1, c2, found = (0.01 * 255) ** 2, (0.03 * 255) ** 2, []
    for y in range(6):
        for x in range(6):
            a, b = one[y : y + 11, x : x + 11], other[y : y + 11, x : x + 11]
            mean_a, mean_b = (weights * a).sum(), (weights * b).sum()
            var_a, var_b = (weights * (a - mean_a) ** 2).sum(), (weights * (b - mean_b) ** 2).sum()
            both = (weights * (a - mean_a) * (b - mean_b)).sum()
            likeness = (2 * mean_a * mean_b + c1) * (2 * both + c2)
            found.append(likeness / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2)))
    assert structural_similarity(noise(1), noise(2)) == pytest.approx(np.mean(found))


def test_an_edit_is_compared_with_each_of_its_sources() -> None:
    found = likeness([flat(0), flat(255)], [[flat(0), flat(255)], [flat(255, 40)]], by="pixels")
    np.testing.assert_allclose(found, [0.5, 1.0])
    assert likeness([noise(0)], [[noise(0)]], by="ssim").tolist() == [1.0]


def test_an_embedding_and_a_column_are_as_before(tmp_path: Path) -> None:
    write_clip(tmp_path)
    model = {"model": str(tmp_path), "by": "embedding"}
    found = likeness([noise(0), noise(1)], [[noise(0)], [noise(0)]], **model)
    assert found[0] == pytest.approx(1.0)
    assert found[1] < 1
    Image.fromarray(noise(0)).save(tmp_path / "wanted.png")
    reward = make_reward("image_similarity", {"model": str(tmp_path), "folder": str(tmp_path)})
    batch = Batch(media=np.stack([noise(0), noise(1)]), prompts=["", ""], metadata=[{"image": "wanted.png"}] * 2)
    np.testing.assert_allclose(score(reward, "image_similarity", batch).values, found, rtol=1e-6)
    pixels = make_reward("image_similarity", {"by": "pixels", "folder": str(tmp_path)})
    np.testing.assert_allclose(score(pixels, "p", batch).values[0], 1.0)


def test_needs_follow_the_options() -> None:
    source = {"to": "source", "by": "ssim"}
    assert (needs_of("image_similarity", source).references, needs_of("image_similarity", {}).references) == (
        True,
        False,
    )
    sections = [RewardSection(name="image_similarity", options=options) for options in ({}, source)]
    assert list(map(works_on_accelerator, sections)) == [True, False]
    for options in ({"to": "nowhere"}, {"by": "eye"}):
        with pytest.raises(ConfigError, match=r"must be 'column' or 'source'|'pixels' or 'ssim'"):
            make_reward("image_similarity", options)
    with pytest.raises(RewardError, match="windows of 11 pixels"):
        likeness([flat(0, 8)], [[flat(0, 8)]], by="ssim")
