"""Folders that lack weights: none is drawn at random, and none is left without memory."""

from __future__ import annotations

from pathlib import Path

import diffusers
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from flowmill.configs.errors import ConfigError
from flowmill.models.policies.diffusion import DiffusionSettings
from flowmill.models.policies.parts import Part
from flowmill.models.policies.sd3 import SD3
from flowmill.models.quickstart.tiny import build_tiny
from flowmill.models.weights.complete import check_complete

LM = transformers.LlamaConfig(
    vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
)


def change(file: Path, name: str, shape: tuple[int, ...] | None) -> None:
    """Remove a tensor of a file, or give it another shape."""
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors | ({} if shape is None else {name: torch.ones(shape)}), file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("component", "name", "shape", "said"),
    [
        ("transformer", "pos_embed.proj.weight", None, r"has no weight 'pos_embed.proj.weight' of shape"),
        ("vae", "decoder.conv_in.bias", None, "has no weight 'decoder.conv_in.bias'"),
        ("vae", "decoder.conv_in.bias", (1,), r"has 'decoder.conv_in.bias' of shape \(1,\) instead of"),
        ("text_encoder", "text_model.final_layer_norm.bias", None, "has no weight 'text_model.final_layer_norm.bias'"),
        ("text_encoder", "text_model.final_layer_norm.bias", (1,), "has weights of other sizes than its config.json"),
    ],
)
def test_a_pipeline_that_lacks_a_weight_is_refused(
    tmp_path: Path, component: str, name: str, shape: tuple[int, ...] | None, said: str
) -> None:
    build_tiny("sd3").save_pretrained(tmp_path)
    settings = DiffusionSettings(height=16, width=16)
    SD3.check_weights(tmp_path)
    change(next((tmp_path / component).glob("*.safetensors")), name, shape)
    with pytest.raises(ConfigError, match=said):
        SD3.check_weights(tmp_path)
    with pytest.raises(ConfigError, match=said):
        SD3.load(tmp_path, settings, frozenset({Part.TEXT}), {})


def test_names_of_older_attention_layers_are_known(tmp_path: Path) -> None:
    vae = build_tiny("sd15").vae
    vae.save_pretrained(tmp_path)
    file = tmp_path / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    old = {name.replace("to_out.0", "proj_attn").replace("to_q", "query"): value for name, value in tensors.items()}
    assert old.keys() != tensors.keys()
    save_file(old, file, metadata={"format": "pt"})
    check_complete(tmp_path, diffusers.AutoencoderKL, label="model.path")


def test_a_language_model_that_lacks_a_weight_is_refused(tmp_path: Path) -> None:
    transformers.AutoModelForCausalLM.from_config(LM).save_pretrained(tmp_path)
    check_complete(tmp_path, transformers.AutoModelForCausalLM, label="model.path")
    change(tmp_path / "model.safetensors", "model.layers.0.mlp.up_proj.weight", None)
    with pytest.raises(ConfigError, match=r"model.path '.*' has no weight 'model.layers.0.mlp.up_proj.weight', which"):
        check_complete(tmp_path, transformers.AutoModelForCausalLM, label="model.path")


def test_weights_that_are_tied_need_no_second_copy(tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=11, n_embd=8, n_layer=1, n_head=2)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    check_complete(tmp_path, transformers.AutoModelForCausalLM, label="model.path")
