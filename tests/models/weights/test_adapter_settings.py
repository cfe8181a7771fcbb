"""Every field of an adapter's settings is followed, does not matter, or is refused by name."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file

from flowmill.configs.errors import ConfigError
from flowmill.models.weights.adapter_settings import ALLOWED, FOLLOWED, MOOT, check_header, check_settings
from flowmill.models.weights.lora import LoraSpec, add_lora, lora_parameters
from flowmill.models.weights.lora_start import peft_adapter, pipeline_adapter

FIELDS = {field.name: field for field in dataclasses.fields(LoraConfig)}


def default(name: str) -> Any:
    field = FIELDS[name]
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def test_each_field_of_peft_is_in_one_table() -> None:
    """A field that a new peft has must be sorted: followed, moot with a reason, or allowed with some values alone."""
    assert sorted([*FOLLOWED, *MOOT, *ALLOWED]) == sorted(FIELDS)
    assert all(len(reason) > 10 for reason in MOOT.values())


def test_what_peft_writes_by_itself_is_accepted() -> None:
    check_settings(Path("here"), "its file", json.loads(json.dumps(LoraConfig(r=2).to_dict(), default=str)))


@pytest.mark.parametrize("name", sorted(ALLOWED))
def test_other_values_of_a_field_are_refused_by_name(name: str) -> None:
    value = {"peft_type": "LOHA", "init_lora_weights": "pissa", "bias": "all"}.get(name, {"a": 1})
    check_settings(Path("here"), "its file", {name: getattr(default(name), "value", default(name))})
    with pytest.raises(ConfigError, match=f"model.lora.start: 'here' has '{name}: .*' in its file, so training cannot"):
        check_settings(Path("here"), "its file", {name: value})


@pytest.mark.parametrize("kind", ["pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga", "something new"])
def test_adapters_relative_to_another_base_are_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"relative to weights that its initialization changed. Convert it with peft"):
        check_settings(Path("here"), "its file", {"init_lora_weights": kind})


def test_fields_of_a_later_peft_are_refused_where_they_say_something() -> None:
    check_settings(Path("here"), "its file", {"use_newer": False, "newer_config": None, "newer": {}})
    with pytest.raises(ConfigError, match=r"has 'use_newer: True' in its file"):
        check_settings(Path("here"), "its file", {"use_newer": True})


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ({"lora_adapter_metadata": '{"transformer.init_lora_weights": "pissa"}'}, "has 'init_lora_weights: pissa'"),
        ({"lora_adapter_metadata": '{"use_dora": true}'}, "has 'use_dora: True' in lora_adapter_metadata"),
        ({"lora_adapter_metadata": '{"text_encoder.bias": "all"}'}, "has 'bias: all'"),
        ({"lora_adapter_metadata": "[1]"}, "has a 'lora_adapter_metadata' in its header that is no JSON object"),
    ],
)  # fmt: skip
def test_headers_that_mean_something_else_are_refused(header: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_header(Path("x.safetensors"), header)


@pytest.mark.parametrize(
    "header",
    [
        {},
        {"format": "pt", "software": '{"name": "ai-toolkit"}', "version": "1.0", "training_info": '{"step": 100}'},
        {"lora_adapter_metadata": json.dumps({"unet.r": 4, "unet.lora_alpha": 8, "unet.bias": "none"})},
        {"ss_network_module": "networks.lora_flux", "ss_network_args": "null", "ss_noise_offset": "0.1"},
        {"modelspec.architecture": "flux-1-dev/lora", "sshs_model_hash": "0"},
    ],
)  # fmt: skip
def test_headers_of_low_rank_adapters_are_accepted(header: dict[str, str]) -> None:
    check_header(Path("x.safetensors"), header)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("blocks.0.attn.to_q.lora_A.weight", (), "a matrix has a rank and inputs or outputs"),
        ("blocks.0.attn.to_q.lora_B.weight", (2,), "a matrix has a rank and inputs or outputs"),
        ("blocks.0.attn.to_q.alpha", (3,), "an alpha is one number"),
    ],
)
def test_tensors_of_another_rank_are_refused_by_name_and_shape(
    tmp_path: Path, name: str, shape: tuple[int, ...], message: str
) -> None:
    tensors = {f"blocks.0.attn.to_q.lora_{side}.weight": torch.ones(2, 2) for side in "AB"} | {name: torch.ones(shape)}
    file = tmp_path / "pytorch_lora_weights.safetensors"
    save_file(tensors, file)
    message = f"model.lora.start: '{file}' has '{name}' of shape {shape}, where {message}, so training cannot begin"
    with pytest.raises(ConfigError, match=re.escape(message)):
        pipeline_adapter(tmp_path, "StableDiffusion3Pipeline", ["transformer"])


def test_settings_of_a_model_without_its_name_are_followed(tmp_path: Path) -> None:
    """``save_lora_adapter`` of a diffusers model writes tensors and settings without the model's name."""
    tensors = {f"blocks.0.attn.to_q.lora_{side}.weight": torch.ones(2, 2) for side in "AB"}
    header = {"lora_adapter_metadata": json.dumps({"r": 2, "lora_alpha": 6})}
    save_file(tensors, tmp_path / "pytorch_lora_weights.safetensors", metadata=header)
    assert pipeline_adapter(tmp_path, "StableDiffusion3Pipeline", ["transformer"]).alpha == 6


def gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=11, n_embd=8, n_layer=2, n_head=2)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def test_adapters_of_transposed_layers_are_those_of_peft(tmp_path: Path) -> None:
    """GPT-2's ``Conv1D`` has weights of shape (inputs, outputs)."""
    targets, ids = ["c_attn", "mlp.c_proj"], torch.arange(8).reshape(2, 4)
    config = LoraConfig(r=3, lora_alpha=6, target_modules=targets, init_lora_weights=False, fan_in_fan_out=True)
    wrapped = get_peft_model(gpt2(), config)
    wrapped.save_pretrained(tmp_path / "peft")
    spec = LoraSpec(rank=3, alpha=6, targets=tuple(targets))
    assert lora_parameters(gpt2(), spec) == 2 * 3 * ((8 + 24) + (32 + 8))
    ours = gpt2()
    add_lora("model", ours, spec, seed=0)
    own = {f"model.{name}": each for name, each in ours.named_parameters() if each.requires_grad}
    given = peft_adapter(tmp_path / "peft", "model").weights({name: each.shape for name, each in own.items()})
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(given[name])
        expected = wrapped(input_ids=ids).logits
        assert torch.equal(ours(input_ids=ids).logits, expected)
        assert not torch.allclose(gpt2()(input_ids=ids).logits, expected, atol=1e-2)
        ours.save_pretrained(tmp_path / "ours")
        again = PeftModel.from_pretrained(gpt2(), tmp_path / "ours").eval()
        torch.testing.assert_close(again(input_ids=ids).logits, expected)
    about = json.loads((tmp_path / "ours" / "adapter_config.json").read_text())
    assert about["fan_in_fan_out"] is True
