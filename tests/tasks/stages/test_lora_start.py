"""Runs that begin as adapters which others trained."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from flowmill.configs.errors import ConfigError
from flowmill.configs.load import parse_config
from flowmill.models.library_loading import quiet_libraries
from flowmill.models.policies.diffusion import DiffusionPolicy
from flowmill.tasks.checks.check import check_config
from flowmill.tasks.inputs.weight_sources import Weights
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runs.opening import begin_run, finished_result, mark_finished, open_run
from tests.conftest import ConfigFactory
from tests.support.foreign_adapters import plain_peft, written
from tests.support.inside import evaluate, prepare, run_epoch, run_stage, session_of, stored_shards
from tests.support.language_models import texts_data
from tests.tasks.stages.test_stages import stored

TARGETS = ["attn.to_q", "attn.to_out.0", "attn.add_q_proj"]
FEW = ("rollout.prompts_per_epoch=1", "rollout.group_size=2")


@pytest.fixture
def adapter(tiny_base: Path, tmp_path: Path) -> Path:
    """An adapter of rank 2 and alpha 3 that plain peft wrote, in another folder than anything else."""
    plain_peft(SD3Transformer2DModel.from_pretrained(tiny_base / "transformer"), tmp_path / "adapter", TARGETS)
    return tmp_path / "adapter"


def in_diffusers_form(adapter: Path, folder: Path) -> Path:
    """Write the adapter as a pipeline does, without any settings: alpha is then the rank."""
    tensors = load_file(adapter / "adapter_model.safetensors")
    scaled = {
        f"transformer.{name.removeprefix('base_model.model.')}": each * 1.5 if ".lora_B." in name else each
        for name, each in tensors.items()
    }
    folder.mkdir()
    return written(scaled, folder / "anything.safetensors")


def test_the_evaluation_before_training_is_that_of_the_pipeline_with_the_adapter(
    make_config: ConfigFactory, tiny_base: Path, adapter: Path, tmp_path: Path
) -> None:
    file = in_diffusers_form(adapter, tmp_path / "diffusers")
    context = prepare(make_config(f"model.lora={{start: {file}}}", "evaluate.samples=2", *FEW))
    evaluate(context, 0)
    shard = stored_shards(context, 0, "evaluate")[0]
    rows = shard.table.select(["prompt", "seed"]).to_pylist()
    quiet_libraries()
    pipe: Any = StableDiffusion3Pipeline.from_pretrained(tiny_base)
    policy = session_of(context).host.trainable(context.policy_ref(0)).policy
    assert isinstance(policy, DiffusionPolicy)
    steps = context.config.evaluate.steps or context.config.rollout.steps
    call = policy.pipeline_call(steps, None)
    assert call is not None
    drawn = {}
    for loads in (False, True):
        if loads:
            pipe.load_lora_weights(file.parent, weight_name=file.name)
        starts = [torch.Generator().manual_seed(row["seed"]) for row in rows]
        drawn[loads] = [
            pipe(row["prompt"], generator=start, output_type="np", **call.arguments).images[0] * 255
            for row, start in zip(rows, starts, strict=True)
        ]
    for number in range(len(rows)):
        ours = shard.media(number).astype(float)
        assert np.abs(drawn[True][number] - ours).max() <= 1
    assert np.abs(drawn[True][0] - drawn[False][0]).max() > 5


def test_rank_alpha_and_layers_are_the_adapters_and_its_bytes_are_part_of_the_policys_name(
    make_config: ConfigFactory, adapter: Path, tmp_path: Path
) -> None:
    config = make_config(f"model.lora={{start: {adapter}}}", *FEW)
    context = prepare(config)
    given = load_file(adapter / "adapter_model.safetensors")
    started = stored(context, 0, Weights.TRAINED.value)
    assert {name.replace(".default", "").removeprefix("transformer.") for name in started} == {
        name.removeprefix("base_model.model.") for name in given
    }
    for name, tensor in given.items():
        side = name.removeprefix("base_model.model.").replace(".weight", ".default.weight")
        assert torch.equal(started[f"transformer.{side}"], tensor)
    run_epoch(context, 1)
    moved = stored(context, 1, Weights.TRAINED.value)
    assert 0 < max(float((moved[name] - started[name]).abs().max()) for name in started) < 0.1
    run_stage(context, "export", 1)
    first = context.policy_ref(0)
    # Elsewhere, by another name and with what it has written out: the same.
    shutil.copytree(adapter, tmp_path / "elsewhere")
    said = f"model.lora={{start: {tmp_path / 'elsewhere'}, rank: 2, alpha: 3}}"
    assert prepare(make_config("run.name=again", said, *FEW)).policy_ref(0) == first
    changed = {name: tensor + (0.01 if ".lora_B." in name else 0) for name, tensor in given.items()}
    written(changed, tmp_path / "elsewhere" / "adapter_model.safetensors", format="pt")
    assert prepare(make_config("run.name=other", said, *FEW)).policy_ref(0) != first
    # Gone: what was made is read on.
    shutil.rmtree(adapter)
    assert open_run(context.store.root.uri, "small", reads=True).policy_ref(1) == context.policy_ref(1)


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_language_model_begins_as_pefts_adapter(tmp_path: Path, algorithm: str) -> None:
    data = texts_data(tmp_path)
    # With a critic, whose adapters are fresh ones of the same layers.
    data["optimize"]["algorithm"] = {"name": algorithm}
    data["advantage"] = {"estimator": {"name": "gae" if algorithm == "ppo" else "group"}}
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "lm")
    plain_peft(base, tmp_path / "adapter", ["q_proj", "down_proj"])
    data["model"]["lora"] = {"start": str(tmp_path / "adapter")}
    context = prepare(parse_config(data, where="here"))
    given = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    started = stored(context, 0, Weights.TRAINED.value)
    assert len(started) == len(given) > 0
    for name, tensor in given.items():
        own = name.removeprefix("base_model.model.").replace(".weight", ".default.weight")
        assert torch.equal(started[f"model.{own}"], tensor)
    run_epoch(context, 1)


Change = Callable[[Path], None]


def _settings(**changes: Any) -> Change:
    def change(adapter: Path) -> None:
        path = adapter / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def _tensors(make: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Change:
    def change(adapter: Path) -> None:
        path = adapter / "adapter_model.safetensors"
        written(make(load_file(path)), path, format="pt")

    return change


def _without_files(adapter: Path) -> None:
    for file in adapter.iterdir():
        file.unlink()


def _two_files(adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").rename(adapter / "a.safetensors")
    shutil.copy(adapter / "a.safetensors", adapter / "b.safetensors")


def _first(tensors: dict[str, torch.Tensor]) -> str:
    return next(name for name in tensors if ".lora_B." in name)


def _layer(name: str) -> str:
    return name.rpartition(".lora_")[0]


def _half(tensor: torch.Tensor, name: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    if _layer(name) != _layer(_first(tensors)):
        return tensor
    return tensor[:1] if ".lora_A." in name else tensor[:, :1]


@pytest.mark.parametrize(
    ("change", "said", "message"),
    [
        (lambda _: None, "rank: 4", "has rank 2, and model.lora.rank is 4.*Write model.lora.rank=2, or leave it out"),
        (lambda _: None, "alpha: 2", "has alpha 3, and model.lora.alpha is 2"),
        (lambda _: None, "targets: [attn.to_q]", "no entry of model.lora.targets names.*Leave model.lora.targets out"),
        (_without_files, "", "has no safetensors file, so training cannot begin with it.*pickled ones"),
        (shutil.rmtree, "", "is no safetensors file and no folder.*Paths are relative to the config file"),
        (_two_files, "", "has 2 safetensors files.*Give the file itself"),
        (_settings(use_dora=True), "", "has 'use_dora: True' in its adapter_config.json.*Merge it into"),
        (_settings(modules_to_save=["proj_out"]), "", "modules_to_save"),
        (_tensors(lambda t: {**t, "base_model.model.x.lora_magnitude_vector": torch.ones(2)}), "", "is no matrix"),
        (_tensors(lambda t: {**t, "base_model.model.x.lokr_w1": torch.ones(2)}), "", "which is no matrix or alpha"),
        (_tensors(lambda t: {**t, "base_model.model.x.bias": torch.ones(2)}), "", "bias., which is no matrix"),
        (_tensors(lambda t: {n: v for n, v in t.items() if n != _first(t)}), "", "has only one matrix of"),
        (_tensors(lambda t: {n: _half(v, n, t) for n, v in t.items()}), "", "of the ranks 1, 2"),
        (lambda a: (a / "adapter_model.safetensors").write_bytes(b"PK"), "", "cannot be read"),
    ],
)  # fmt: skip
def test_adapters_that_cannot_be_begun_as_are_refused_before_anything_runs(
    make_config: ConfigFactory, adapter: Path, change: Change, said: str, message: str
) -> None:
    change(adapter)
    with pytest.raises(ConfigError, match=f"model.lora.start: .*{message}"):
        check_config(make_config(f"model.lora={{start: {adapter}{', ' if said else ''}{said}}}"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_tensors(lambda t: {n.replace("blocks.0", "blocks.9"): v for n, v in t.items()}), "start, matches no layer"),
        (_tensors(lambda t: {n: v[:-1] if ".lora_B." in n else v for n, v in t.items()}), "where the model takes"),
    ],
)  # fmt: skip
def test_adapters_of_another_model_are_refused(
    make_config: ConfigFactory, adapter: Path, change: Change, message: str
) -> None:
    change(adapter)
    with pytest.raises(ConfigError, match=message):
        prepare(make_config(f"model.lora={{start: {adapter}}}", *FEW))


@pytest.mark.parametrize("setting", ["model.lora={{start: {}}}", "critic.path={}"])
def test_a_finished_run_is_not_finished_when_what_it_began_as_is_another(
    make_config: ConfigFactory, adapter: Path, setting: str
) -> None:
    config = make_config(setting.format(adapter), *FEW)
    context = begin_run(config)
    mark_finished(context, {"text": "done"})
    assert finished_result(RunContext(context.store, config, context.run)) is not None
    # Whether a finish still stands is all that is asked here, so a critic may be any bytes.
    file = adapter / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert finished_result(RunContext(context.store, config, context.run)) is None
