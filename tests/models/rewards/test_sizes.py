"""The memory of reward models is known without loading them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import CLIPConfig, CLIPModel

from configs.rewards import RewardSection
from models.memory.activation_tracing import fake_module, traced
from models.memory.published import Transformer
from models.rewards.factory import takes_of
from models.rewards.sizes import Takes, encoder_of, transformer_takes
from models.weights.sharding import layers
from tasks.checks.memory import RewardMemory
from tests.support.clip import write_clip


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
    in_layers = [sum(p.numel() for p in layer.parameters()) for layer in layers(made)]
    assert (sum(in_layers), max(in_layers)) == (known.layered, known.largest)
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    fake_module(made.eval(), fakes)
    with traced(fakes) as memory, torch.no_grad():
        made.vision_model(pixel_values=torch.empty(rows, 3, 224, 224))
    assert 0.7 * rows * taken.row < memory.peak <= rows * taken.row
    assert taken.followed is not None
    with traced(fakes) as memory:
        images = torch.empty(rows, 3, 224, 224).requires_grad_()
        made.requires_grad_(False).vision_model(pixel_values=images).pooler_output.sum().backward()
    assert 0.9 * rows * taken.followed < memory.peak <= rows * taken.followed


def test_a_folder_is_counted_from_its_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"vision_config": {"hidden_size": 8, "intermediate_size": 32, "image_size": 28, "patch_size": 14}}'
    )
    save_file({"a": torch.zeros(3, 4), "b": torch.zeros(5)}, tmp_path / "model.safetensors")
    assert encoder_of(str(tmp_path)) == Transformer(parameters=17, tokens=5, width=8, inner=32, gates=2)
    taken = takes_of("clip_score", {"model": str(tmp_path), "dtype": "bfloat16"})
    assert taken == Takes(weights=34, row=5 * (5 * 8 + 3 * 32) * 2)
    assert takes_of("rank", {"reward": "clip_score", "options": {"model": str(tmp_path), "dtype": "bfloat16"}}) == taken


def test_of_layers_that_ranks_hold_together_each_takes_its_part(tmp_path: Path) -> None:
    folder = write_clip(tmp_path)
    in_layers = [sum(p.numel() for p in each.parameters()) for each in layers(CLIPModel.from_pretrained(folder))]
    taken = takes_of("clip_score", {"model": folder})
    assert taken is not None
    assert (taken.layers, taken.layer) == (4 * sum(in_layers), 4 * max(in_layers))
    assert taken.of_rank(4) == taken.weights - taken.layers * 3 // 4 + 2 * taken.layer
    section = RewardSection(name="hpsv3", options={"weights": "w", "instruction": "i"}, spread=True)
    whole, spread = (RewardMemory.of([section], ranks).weights for ranks in (1, 8))
    assert (whole / 1e9, spread / 1e9) == (pytest.approx(15.5, abs=0.1), pytest.approx(3.9, abs=0.1))
    assert RewardMemory.of([section.model_copy(update={"spread": False})], 8).weights == whole


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
