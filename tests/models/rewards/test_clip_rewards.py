"""Rewards from CLIP embeddings against transformers' own model and processor, on a small random model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import CLIPModel, CLIPProcessor

from flowmill.configs.errors import ConfigError, RewardError
from flowmill.models.rewards.base import Batch
from flowmill.models.rewards.factory import make_reward
from flowmill.models.rewards.invocation import Handling, score
from tests.support.clip import write_clip, write_head

PROMPTS = ["a red bicycle", "two cats, asleep " * 40, ""]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_clip(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (3, 48, 64, 3), np.uint8)


@pytest.fixture(scope="module")
def reference(folder: str, images: np.ndarray) -> Any:
    """The results of model and processor in their plainest call."""
    model, processor = CLIPModel.from_pretrained(folder), CLIPProcessor.from_pretrained(folder)
    pictures = [Image.fromarray(image) for image in images]
    inputs = processor(text=PROMPTS, images=pictures, return_tensors="pt", padding=True, truncation=True)
    with torch.no_grad():
        return model(**inputs)


def scored(
    name: str, images: np.ndarray, *metadata: dict[str, Any], batch_size: int | None = None, **options: Any
) -> np.ndarray:
    batch = Batch(media=images, prompts=PROMPTS, metadata=metadata or [{}] * 3)
    return score(make_reward(name, options), name, batch, Handling(batch_size=batch_size)).values


@pytest.mark.parametrize("batch_size", [None, 1, 2, 8])
def test_scores_follow_the_logits_of_the_model(
    folder: str, images: np.ndarray, reference: Any, batch_size: int | None
) -> None:
    logits = reference.logits_per_image.diagonal().numpy()
    common: dict[str, Any] = {"model": folder, "batch_size": batch_size}
    pick = {**common, "processor": folder}
    np.testing.assert_allclose(scored("pickscore", images, **pick), logits / 26, rtol=1e-5)
    np.testing.assert_allclose(scored("clip_score", images, convention="flow_grpo", **common), logits / 30, rtol=1e-5)
    cosines = (reference.image_embeds * reference.text_embeds).sum(-1).numpy()
    np.testing.assert_allclose(scored("clip_score", images, **common), cosines, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(scored("pickscore", images, convention="cosine", **pick), cosines, rtol=1e-5, atol=1e-7)


def test_an_image_is_most_like_itself(folder: str, images: np.ndarray, reference: Any, tmp_path: Path) -> None:
    for number, image in enumerate(images):
        Image.fromarray(image).save(tmp_path / f"{number}.png")
    own = [{"image": f"{number}.png"} for number in range(3)]
    options = {"model": folder, "folder": str(tmp_path)}
    np.testing.assert_allclose(scored("image_similarity", images, *own, **options), 1.0, rtol=1e-6)
    embeddings = reference.image_embeds
    expected = (embeddings * embeddings.roll(-1, 0)).sum(-1).numpy()
    np.testing.assert_allclose(
        scored("image_similarity", images, *[own[1], own[2], own[0]], **options), expected, rtol=1e-5
    )
    with pytest.raises(RewardError, match="no path of an image in column 'image'"):
        scored("image_similarity", images, **options)


def test_taste_is_the_published_layers_on_the_embedding(
    folder: str, images: np.ndarray, reference: Any, tmp_path: Path
) -> None:
    head = write_head(tmp_path / "head.safetensors")
    value, stored = reference.image_embeds, load_file(head)
    for place in (0, 2, 4, 6, 7):
        value = value @ stored[f"layers.{place}.weight"].T + stored[f"layers.{place}.bias"]
    expected = value.squeeze(-1).numpy()
    np.testing.assert_allclose(scored("aesthetic", images, model=folder, head=head), expected, rtol=1e-5)
    save_file({"layers.0.weight": torch.zeros(1)}, tmp_path / "other.safetensors")
    (tmp_path / "pickled.pth").write_bytes(b"\x80\x04.")
    for other in ("other.safetensors", "pickled.pth", "nowhere.safetensors"):
        with pytest.raises(ConfigError, match=r"option 'head': .*Convert the published"):
            scored("aesthetic", images, model=folder, head=str(tmp_path / other))


def test_what_cannot_be_loaded_is_named(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"reward 'clip_score': '.*nowhere' cannot be loaded"):
        make_reward("clip_score", {"model": str(tmp_path / "nowhere")})
    model = CLIPModel.from_pretrained(folder)
    CLIPProcessor.from_pretrained(folder).save_pretrained(tmp_path)
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="has safetensors weights"):
        make_reward("clip_score", {"model": str(tmp_path)})
    with pytest.raises(ConfigError, match="Set 'device' next to 'options'"):
        make_reward("clip_score", {"model": folder, "device": "cpu"})
    with pytest.raises(ConfigError, match="device of reward 'clip_score' is 'cuda', but torch finds no accelerator"):
        make_reward("clip_score", {"model": folder}, device="cuda")
    with pytest.raises(ConfigError, match="takes no device"):
        make_reward("constant", {}, device="cpu")
