"""``check`` and ``run`` give one verdict: what a run refuses before its first sample, ``check`` refuses from files.

A fault is one row of ``FAULTS``: what is changed in a working config and its folders, and what both say. Places in the
code that refuse something are found by their source, see ``test_each_refusal_is_reached_by_check``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from flowmill.configs.errors import ConfigError
from flowmill.configs.load import parse_config
from flowmill.configs.schema import RunConfig
from flowmill.models.quickstart.tiny import build_tiny
from flowmill.tasks.checks.check import check_config
from flowmill.tasks.inputs.components import make_algorithm
from flowmill.tasks.inputs.policy_kind import kind_name
from flowmill.tasks.modalities.tokens.run_prompts import read_prompts
from flowmill.tasks.runtime.host import ModelHost
from tests.support.foreign_adapters import plain_peft
from tests.support.inside import prepare, session_of
from tests.support.language_models import texts_data

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
Change = Callable[[dict[str, Any], Path], None]


def setting(place: str, value: Any) -> Change:
    """Set one setting, in which ``{}`` stands for the test's folder."""

    def change(data: dict[str, Any], folder: Path) -> None:
        *sections, name = place.split(".")
        for section in sections:
            data = data.setdefault(section, {})
        data[name] = _filled(value, folder)

    return change


def _filled(value: Any, folder: Path) -> Any:
    if isinstance(value, dict):
        return {name: _filled(each, folder) for name, each in value.items()}
    return value.format(folder) if isinstance(value, str) else value


def removed(file: str, name: str, shape: tuple[int, ...] | None = None) -> Change:
    """Remove a weight of a safetensors file, or give it another shape."""

    def change(data: dict[str, Any], folder: Path) -> None:
        tensors = load_file(folder / file)
        del tensors[name]
        more = {} if shape is None else {name: torch.ones(shape)}
        save_file(tensors | more, folder / file, metadata={"format": "pt"})

    return change


def about(file: str, **fields: Any) -> Change:
    """Change fields of a JSON file."""

    def change(data: dict[str, Any], folder: Path) -> None:
        path = folder / file
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    return change


def both(*changes: Change) -> Change:
    def change(data: dict[str, Any], folder: Path) -> None:
        for each in changes:
            each(data, folder)

    return change


def adapter(*targets: str, rows: int | None = None, rename: tuple[str, str] = ("", "")) -> Change:
    """Begin with an adapter that peft wrote for the language model, changed."""

    def change(data: dict[str, Any], folder: Path) -> None:
        plain_peft(transformers.AutoModelForCausalLM.from_pretrained(folder / "lm"), folder / "adapter", targets)
        file = folder / "adapter" / "adapter_model.safetensors"
        tensors = {name.replace(*rename): each for name, each in load_file(file).items()}
        save_file({n: t[:rows].clone() if ".lora_B." in n else t for n, t in tensors.items()}, file)
        data["model"]["lora"] = {"start": str(folder / "adapter")}

    return change


def bert(data: dict[str, Any], folder: Path) -> None:
    config = transformers.BertConfig(
        vocab_size=300, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.BertLMHeadModel(config)
    for file in (folder / "lm").glob("*.safetensors"):
        file.unlink()
    model.save_pretrained(folder / "lm")


def quantized(name: str, place: str) -> Change:
    """Take the language model as bitsandbytes stores it in four bits."""

    def change(data: dict[str, Any], folder: Path) -> None:
        bits = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
        made = transformers.AutoModelForCausalLM.from_pretrained(folder / "lm", quantization_config=bits)
        shutil.copytree(folder / "lm", folder / f"{name} 4")
        made.save_pretrained(folder / f"{name} 4")
        setting(place, f"{{}}/{name} 4")(data, folder)

    return change


def teacher(*changes: Change, family: str = "sd3") -> Change:
    def change(data: dict[str, Any], folder: Path) -> None:
        build_tiny(family).save_pretrained(folder / "teacher")
        both(*changes)(data, folder)
        options = {"teacher": str(folder / "teacher")}
        data["optimize"]["algorithm"] = {"name": "opd", "options": options}

    return change


PPO = both(setting("optimize.algorithm", {"name": "ppo"}), setting("advantage.estimator", {"name": "gae"}))
UP = "model.layers.0.mlp.up_proj.weight"
#: Of language models: what is changed, and what ``check`` and ``run`` say.
LANGUAGE: dict[str, tuple[Change, str]] = {
    "a target of adapters that matches nothing": (
        setting("model.lora", {"rank": 2, "targets": ["q_proj", "q_prj"]}),
        "model.lora: 'q_prj', of targets or of the adapter of start, matches no layer of 'model'",
    ),
    "a target that a critic does not have": (
        both(PPO, setting("model.lora", {"rank": 2, "targets": ["q_proj", "lm_head"]})),
        "'lm_head', of targets or of the adapter of start, matches no layer of 'critic'",
    ),
    "an adapter of layers that the model does not have": (
        adapter("q_proj", rename=("q_proj", "q_prj")),
        "model.lora: 'layers.0.self_attn.q_prj', of targets or of the adapter of start, matches no layer",
    ),
    "an adapter of another width": (adapter("q_proj", rows=3), "where the model takes"),
    "a model that lacks a weight": (removed("lm/model.safetensors", UP), f"model.path '.*' has no weight '{UP}'"),
    "a model with a weight of another shape": (
        removed("lm/model.safetensors", UP, (2, 2)),
        "has weights of other sizes than its config.json says",
    ),
    "a config of another size": (about("lm/config.json", intermediate_size=48), "has weights of other sizes than"),
    "a model without weights": (lambda _, f: (f / "lm/model.safetensors").unlink(), "model.path '.*lm' cannot be"),
    "a model that is cut off": (
        lambda _, f: (f / "lm/model.safetensors").write_bytes(b"short"),
        "model.path '.*lm' cannot be loaded: .*",
    ),
    "a model that reads both ways": (bert, "holds a BertLMHeadModel that reads texts both ways"),
    "a critic that lacks a weight": (
        both(
            PPO,
            lambda _, f: shutil.copytree(f / "lm", f / "critic"),
            removed("critic/model.safetensors", UP),
            setting("critic.path", "{}/critic"),
        ),
        f"critic.path '.*' has no weight '{UP}'",
    ),
    "prompts that are longer than the model takes": (
        setting("rollout.tokens.max_prompt", 2),
        "tokens, but at most 2 fit",
    ),
    "completions that are longer than the model takes": (
        setting("rollout.tokens.max_new", 60_000),
        "rollout.tokens.max_new is 60000, but the model takes",
    ),
    "a chat template that is not there": (setting("rollout.tokens.template", "chat"), "template"),
    "a system prompt without a chat template": (
        setting("rollout.tokens.system", "Be brief."),
        "rollout.tokens.system is set, but prompts go through no chat template",
    ),
    "a model that is stored in four bits": (
        quantized("lm", "model.path"),
        "stored quantized .*The run trains all weights, and quantized ones cannot be trained. Set model.lora",
    ),
    "a critic that is stored in four bits": (
        both(PPO, quantized("critic", "critic.path")),
        "stored quantized .*The run trains all weights, and quantized ones cannot be trained. Set model.lora",
    ),
    "a critic that is not there": (both(PPO, setting("critic.path", "{}/nowhere")), "critic.path"),
}
#: Of diffusion models.
PIPELINES: dict[str, tuple[Change, str]] = {
    "a target of adapters that matches nothing": (
        setting("model.lora", {"rank": 2, "targets": ["attn.to_q", "attn.to_w"]}),
        "model.lora: 'attn.to_w', of targets or of the adapter of start, matches no layer of 'transformer'",
    ),
    "a transformer that lacks a weight": (
        removed("base/transformer/diffusion_pytorch_model.safetensors", "proj_out.bias"),
        "transformer' has no weight 'proj_out.bias'",
    ),
    "a text encoder that lacks a weight": (
        removed("base/text_encoder/model.safetensors", "text_model.final_layer_norm.bias"),
        "text_encoder' has no weight 'text_model.final_layer_norm.bias'",
    ),
    "a teacher that is not there": (
        setting("optimize.algorithm", {"name": "opd", "options": {"teacher": "{}/nowhere"}}),
        "teacher '.*nowhere' is no folder|model.path '.*nowhere' is no folder",
    ),
    "a teacher of another family": (teacher(family="sd15"), "holds a StableDiffusionPipeline, but model.policy 'sd3'"),
    "a teacher that lacks a weight": (
        teacher(removed("teacher/transformer/diffusion_pytorch_model.safetensors", "proj_out.bias")),
        "teacher.*transformer' has no weight 'proj_out.bias'",
    ),
    "a teacher without a component": (
        teacher(lambda _, f: shutil.rmtree(f / "teacher" / "scheduler")),
        "teacher' has no scheduler/scheduler_config.json",
    ),
}


def started(config: RunConfig) -> None:
    """Do what a run does before its first sample, without looking at the config first."""
    context = prepare(config)
    host: ModelHost = session_of(context).host
    if kind_name(config) == "tokens":
        read_prompts(context)
    trainable, requires = host.trainable(context.policy_ref(0)), make_algorithm(config).requires
    for name, folder in requires.teachers:
        host.give_teacher(trainable, folder, name)
    if requires.critic:
        host._fresh_critic()


def pipeline(folder: Path, config_data: dict[str, Any]) -> dict[str, Any]:
    shutil.copytree(config_data["model"]["path"], folder / "base")
    config_data["model"] = {**config_data["model"], "path": str(folder / "base")}
    return config_data


@pytest.mark.parametrize("name", LANGUAGE)
def test_faults_of_language_models_are_refused_by_check_and_by_run(name: str, tmp_path: Path) -> None:
    _same_verdict(texts_data(tmp_path), tmp_path, *LANGUAGE[name])


@pytest.mark.parametrize("name", PIPELINES)
def test_faults_of_pipelines_are_refused_by_check_and_by_run(
    name: str, tmp_path: Path, config_file: Path, config_data: dict[str, Any]
) -> None:
    _same_verdict(pipeline(tmp_path, config_data), tmp_path, *PIPELINES[name])


def _same_verdict(data: dict[str, Any], folder: Path, change: Change, said: str) -> None:
    check_config(parse_config(data, where="here"))
    change(data, folder)
    config = parse_config(data, where="here")
    with pytest.raises(ConfigError, match=said):
        check_config(config)
    with pytest.raises(ConfigError, match=said):
        started(config)
