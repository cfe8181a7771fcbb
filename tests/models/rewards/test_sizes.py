"""The memory of reward models is known without loading them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import CLIPConfig, CLIPModel

from flowmill.models.memory.published import Transformer
from flowmill.models.memory.tracing import fake_module, traced
from flowmill.models.rewards.factory import takes_of
from flowmill.models.rewards.sizes import Takes, encoder_of, transformer_takes


def clip(text: tuple[int, int, int], vision: tuple[int, int, int, int], projection: int, act: str) -> CLIPModel:
    """Return a CLIP without weights: widths, layers and heads of text, and of images, and its activation."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads")
    width, layers, heads, patch = vision
    config = CLIPConfig(
        text_config={**dict(zip(names, text, strict=True)), "intermediate_size": 4 * text[0]},
        vision_config={
            **dict(zip(names, (width, layers, heads), strict=True)),
            "intermediate_size": 4 * width,
            "patch_size": patch,
            "hidden_act": act,
        },
        projection_dim=projection,
    )
    with torch.device("meta"):
        return CLIPModel(config)


@pytest.mark.parametrize(
    ("path", "module"),
    [
        ("openai/clip-vit-large-patch14", lambda: clip((768, 12, 12), (1024, 24, 16, 14), 768, "quick_gelu")),
        ("laion/CLIP-ViT-H-14-laion2B-s32B-b79K", lambda: clip((1024, 24, 16), (1280, 32, 16, 14), 1024, "gelu")),
    ],
)
def test_published_models_have_their_size_and_take_no_more_than_is_said(path: str, module: type) -> None:
    made, rows, known, taken = module(), 4, encoder_of(path), transformer_takes(path, "float32")
    assert known is not None
    assert taken is not None
    assert sum(parameter.numel() for parameter in made.parameters()) == known.parameters
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    fake_module(made.eval(), fakes)
    with traced(fakes) as memory, torch.no_grad():
        made.vision_model(pixel_values=torch.empty(rows, 3, 224, 224))
    assert 0.7 * rows * taken.row < memory.peak <= rows * taken.row
    assert taken.followed is not None
    with traced(fakes) as memory:
        images = torch.empty(rows, 3, 224, 224).requires_grad_()
        made.requires_grad_(False).vision_model(pixel_values=images).pooler_output.sum().backward()
    assert 0.5 * rows * taken.followed < memory.peak <= rows * taken.followed


def test_a_folder_is_counted_from_its_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"vision_config": {"hidden_size": 8, "intermediate_size": 32, "image_size": 28, "patch_size": 14}}'
    )
    save_file({"a": torch.zeros(3, 4), "b": torch.zeros(5)}, tmp_path / "model.safetensors")
    assert encoder_of(str(tmp_path)) == Transformer(parameters=17, tokens=5, width=8, inner=32)
    taken = takes_of("clip_score", {"model": str(tmp_path), "dtype": "bfloat16"})
    assert taken == Takes(weights=34, row=5 * (5 * 8 + 3 * 32) * 2)
    assert takes_of("rank", {"reward": "clip_score", "options": {"model": str(tmp_path), "dtype": "bfloat16"}}) == taken


def test_what_is_neither_here_nor_published_is_not_known() -> None:
    assert encoder_of("someone/else") is None
    assert takes_of("clip_score", {"model": "someone/else"}) is None
    assert takes_of("jpeg_compressibility", {}) is None


def test_a_reward_that_reads_prompts_by_a_pipeline_takes_its_text_encoders_too() -> None:
    taken, fewer = (takes_of("dina_lrm", options) for options in ({}, {"taps": [4]}))
    assert taken is not None
    assert fewer is not None
    assert taken.weights == pytest.approx(11.2e9 + 2.2e9, rel=0.1)
    assert fewer.weights < taken.weights - 1e9


def test_hpsv3_takes_its_gigabytes() -> None:
    taken = takes_of("hpsv3", {})
    assert taken is not None
    assert taken.weights == pytest.approx(15.5e9, rel=0.01)
