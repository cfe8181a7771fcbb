"""Runs on a quantized base: sampling and training agree, a restart changes nothing, and the adapters are exported."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from diffusers import DiffusionPipeline
from peft import PeftModel
from torch.nn import Linear
from transformers import AutoModelForCausalLM

from flowmill.configs.errors import ConfigError
from flowmill.configs.load import load_config
from flowmill.configs.schema import RunConfig
from flowmill.models.weights.quantized import dequantized, is_quantized
from flowmill.tasks.checks.check import check_config
from flowmill.tasks.inputs.base_model import front_matter
from flowmill.tasks.inputs.weight_sources import Weights, exported_folder
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.specs.graph import Node
from flowmill.tasks.training import epoch as training
from tests.conftest import ConfigFactory
from tests.support.inside import evaluate, prepare, run_epoch, run_stage, session_of
from tests.support.language_models import drawn_texts_data, texts_data
from tests.tasks.training.test_training_stage import stopping_after

LORA = "model.lora={rank: 2, alpha: 4}"


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A run of a language model, as a file."""
    path = tmp_path / "texts.yaml"
    path.write_text(yaml.safe_dump(texts_data(tmp_path)))
    return path


def trained(config: RunConfig) -> RunContext:
    check_config(config)
    context = prepare(config)
    run_epoch(context, 1)
    return context


def largest_gap(context: RunContext) -> float:
    """Return the largest distance of a first log-prob in training from that of the rollout."""
    manifest = context.store.require(context.chain.require(1, "optimize").ref)
    return float(manifest.summary["updates"][0]["replay_gap_max"])


def exported(context: RunContext) -> Path:
    for epoch in (0, 1):
        evaluate(context, epoch)
    run_stage(context, "export", 1)
    return exported_folder(context.store, context.chain.target(Node(1, "export")))


def policy_of(context: RunContext) -> Any:
    return session_of(context).host.trainable(context.policy_ref(1), Weights.TRAINED).policy


@pytest.mark.parametrize(("quantizer", "dtype", "most"), [("int8", "float32", 0), ("int4", "bfloat16", 0.05)])
def test_texts_are_trained_as_they_are_drawn(texts: Path, quantizer: str, dtype: str, most: float) -> None:
    context = trained(load_config(texts, [LORA, f"model.quantize.name={quantizer}", f"model.dtype={dtype}"]))
    assert largest_gap(context) <= most
    numbers = sum(parameter.numel() for parameter in policy_of(context).model.parameters())
    assert session_of(context).host.loaded()["policy"] < numbers * getattr(torch, dtype).itemsize


def test_peft_loads_the_adapters_next_to_a_base_that_is_rounded_or_not(texts: Path) -> None:
    context = trained(load_config(texts, [LORA, "model.quantize.name=int8"]))
    folder, ids, own = exported(context), torch.arange(6)[None], policy_of(context)
    said = "rounded the linear layers to int8, as `quantization_config=TorchAoConfig("
    assert said in (folder / "README.md").read_text()
    model = AutoModelForCausalLM.from_pretrained(str(context.config.model.path))
    plain = PeftModel.from_pretrained(model, folder)
    with torch.no_grad():
        expected = own.forward(ids).logits
        assert 0 < (plain(ids).logits - expected).abs().max() < 0.1
        for name, layer in own.model.named_modules():
            if is_quantized(layer._parameters.get("weight")):
                model.get_submodule(name).weight.data = dequantized(layer.weight, torch.float32)
        torch.testing.assert_close(plain(ids).logits, expected)


def test_images_are_trained_as_they_are_drawn_and_diffusers_loads_the_adapters(make_config: ConfigFactory) -> None:
    context = trained(make_config(LORA, "model.quantize={name: float8, text_encoders: int8}"))
    assert largest_gap(context) == 0
    whole = prepare(make_config(LORA, "run.name=whole"))
    for stage in ("policy", "encode"):
        assert whole.chain.require(0, stage).ref != context.chain.require(0, stage).ref
    assert whole.chain.require(0, "base").ref == context.chain.require(0, "base").ref
    folder = exported(context)
    card = (folder / "README.md").read_text()
    assert front_matter(folder / "README.md")["flowmill"]["quantize"] == {"name": "float8", "text_encoders": "int8"}
    assert card.count("rounded the linear layers to") == 2
    pipe = DiffusionPipeline.from_pretrained(str(context.base_folder), text_encoder_3=None, tokenizer_3=None)
    pipe.load_lora_weights(folder)
    assert pipe.get_active_adapters()


def test_a_restart_within_an_epoch_changes_nothing(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = []
    for stopped in (False, True):
        own = (
            LORA,
            "model.quantize.name=int4",
            "execution.checkpoint_every=1",
            f"store.root={tmp_path / str(stopped)}",
        )
        if stopped:
            with monkeypatch.context() as patched:
                patched.setattr(training, "run_updates", stopping_after(1))
                with pytest.raises(OSError, match="the disk is gone"):
                    trained(load_config(texts, own))
        context = trained(load_config(texts, own))
        digests.append(context.store.require(context.policy_ref(1)).digest)
    assert digests[0] == digests[1]


def test_a_quantized_image_model_draws_texts(tmp_path: Path, tiny_base: Path) -> None:
    drawn = []
    for section in ({"name": "int8", "text_encoders": "int8"}, None):
        data = drawn_texts_data(tmp_path, tiny_base)
        data["render"]["model"]["quantize"] = section
        data["run"]["name"] = f"quantized-{section is not None}"
        (tmp_path / "drawn.yaml").write_text(yaml.safe_dump(data))
        context = trained(load_config(tmp_path / "drawn.yaml"))
        drawn.append(context.chain.require(1, "render").ref)
        rendering = session_of(context).host.renderer
        assert rendering is not None
        layers = [
            layer.weight for layer in rendering.policy().denoisers["transformer"].modules() if isinstance(layer, Linear)
        ]
        assert {is_quantized(weight) for weight in layers} == {section is not None}
    assert drawn[0] != drawn[1]


INT8 = (LORA, "model.quantize.name=int8")
REFUSED = [
    (("model.quantize.name=int8",), r"model.quantize.name is 'int8', but the run trains all weights.*Set model.lora"),
    ((LORA, "model.quantize={}"), r"model.quantize names no quantizer. Set its name or text_encoders, or remove it."),
    ((LORA, "model.quantize.name=int5"), r"model.quantize.name.*'int8', 'float8', 'int4' or 'nf4'"),
    ((*INT8, "execution.strategy=fsdp", "execution.processes=2"), r"which cannot shard the packed weights"),
    ((*INT8, "model.compile=true"), r"model.compile is set, but quantized layers .* not compiled"),
    ((LORA, "model.quantize.name=nf4", "execution.device=cpu"), r"'nf4', which diffusers loads on CUDA and XPU only"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_settings_that_cannot_work_are_refused(
    settings: tuple[str, ...], message: str, make_config: ConfigFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowmill.models.weights.quantized.require_extra", lambda *names, label: None)
    with pytest.raises(ConfigError, match=message):
        check_config(make_config(*settings))


def test_a_language_model_has_no_text_encoders_and_a_missing_package_is_named(
    texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"has no text encoders. Remove it; model.quantize.name quantizes the model"):
        check_config(load_config(texts, [LORA, "model.quantize={text_encoders: int8}"]))
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(
        ConfigError, match=r"model.quantize 'nf4' needs 'bitsandbytes'.*pip install 'flowmill\[quantize\]'"
    ):
        check_config(load_config(texts, [LORA, "model.quantize.name=nf4"]))
