"""No code of a model's folder runs, nobody is asked, no adapter is loaded in silence, and its files are bounded."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, ProcessorMixin

from flowmill.configs.errors import ConfigError
from flowmill.configs.schema import RunConfig
from flowmill.models.library_loading import read_json
from flowmill.models.memory.language_architectures import language_config, meta_language_model
from flowmill.models.policies.base import PolicySettings
from flowmill.models.policies.causal_lm import CausalLM
from flowmill.models.policies.critic_lm import CriticLM
from flowmill.models.policies.language_model_folders import check_folder, check_vocabulary
from flowmill.models.policies.parts import Part
from flowmill.models.quickstart.addition import tiny_model
from flowmill.models.rewards.factory import make_reward
from flowmill.models.weights.finite import check_finite, check_tensors
from flowmill.models.weights.pretrained_loading import (
    auto_from_config,
    check_model_folder,
    check_patterns,
    load_pretrained,
)
from flowmill.models.weights.stored_weights import StoredWeights
from flowmill.tasks.checks.check import check_config
from flowmill.tasks.checks.names import check_names
from flowmill.tasks.inputs.model_settings import check_model
from flowmill.tasks.specs.plan import RunPlan
from tests.support.language_models import texts_data, write_language_model
from tests.support.small import small_data
from tests.support.text_models import write_sentiment

ROOT = Path(__file__).parents[3]
PACKAGES = ("configs", "storage", "models", "tasks", "flows", "flowmill", "pages")
LOADER = ROOT / "models" / "weights" / "pretrained_loading.py"
SETTINGS = PolicySettings(dtype=torch.float32, device=torch.device("cpu"))


def test_libraries_load_in_one_place_alone() -> None:
    found, files = [], [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and _loads(node):
                found.append((path, node.attr))
    assert {path for path, _ in found} == {LOADER}
    assert {name for _, name in found} == {"from_pretrained", "from_config"}


def _loads(node: ast.Attribute) -> bool:
    """Return whether a call can run code of a folder; schedulers and denoisers of a given class cannot."""
    made = ast.unparse(node.value)
    own = node.attr == "from_config" and (made == "loader" or re.search(r"\bAuto[A-Z]", made) is not None)
    return own or node.attr in ("from_pretrained", "from_single_file", "from_pipe", "get_class_from_dynamic_module")


def test_json_of_others_is_read_in_one_place_alone() -> None:
    """What else parses JSON in models: what servers answer, what a reward is given, and files of builders."""
    found = {
        path.relative_to(ROOT / "models").as_posix()
        for path in (ROOT / "models").rglob("*.py")
        if re.search(r"\bjson\.loads?\(", path.read_text(encoding="utf-8"))
    }
    own = {name for name in found if name.startswith(("engines/", "quickstart/", "rewards/service/"))}
    assert found - own == {
        "library_loading.py",
        "rewards/reasoning.py",
        "weights/adapter_settings.py",
        "weights/safetensors_header.py",
    }


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(question: str = "") -> str:
        raise AssertionError(f"somebody was asked: {question}")

    monkeypatch.setattr("builtins.input", answer)


def change(file: Path, **entries: Any) -> None:
    about = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(about | entries))


def with_code(folder: Path, file: str, **entries: Any) -> Path:
    """Write a model whose file names classes in the folder; its code leaves a mark when it runs."""
    write_language_model(folder)
    (folder / "own.py").write_text(f"open({str(folder / 'ran')!r}, 'w').close()\n")
    change(folder / file, **entries)
    return folder


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize(
    ("file", "entries", "loader"),
    [
        ("config.json", {"model_type": "own", "auto_map": {"AutoConfig": "own.C"}}, AutoConfig),
        (
            "config.json",
            {"model_type": "own", "auto_map": {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}},
            AutoModelForCausalLM,
        ),
        (
            "tokenizer_config.json",
            {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}},
            AutoTokenizer,
        ),
    ],
)
def test_code_of_a_folder_is_refused_by_name(tmp_path: Path, file: str, entries: dict[str, Any], loader: Any) -> None:
    folder = with_code(tmp_path / "lm", file, **entries)
    with pytest.raises(ConfigError, match=r"model\.path '.*' needs code of its own.*No code of a model is ever run"):
        load_pretrained(loader, folder, label="model.path")
    assert not (folder / "ran").exists()


@pytest.mark.usefixtures("asked")
def test_code_is_refused_where_a_library_loads_inside_a_library(tmp_path: Path) -> None:
    """A processor loads its tokenizer itself, without the argument that forbids code."""

    class Texts(ProcessorMixin):
        def __init__(self, tokenizer: Any = None) -> None:
            self.tokenizer = tokenizer

        @classmethod
        def from_pretrained(cls, folder: Any, **given: Any) -> Any:
            return cls(AutoTokenizer.from_pretrained(folder))

    entries = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    folder = with_code(tmp_path / "lm", "tokenizer_config.json", **entries)
    with pytest.raises(ConfigError, match="needs code of its own"):
        load_pretrained(Texts, folder, label="model.path")
    assert not (folder / "ran").exists()


@pytest.mark.usefixtures("asked")
def test_a_config_that_names_code_makes_no_model() -> None:
    config = tiny_model(0).config
    config.auto_map = {"AutoModelForCausalLM": "own.M"}
    assert type(auto_from_config(AutoModelForCausalLM, config)).__name__ == type(tiny_model(0)).__name__
    config.__class__ = type("Own", (type(config),), {})
    with pytest.raises(ConfigError, match="needs code of its own"):
        auto_from_config(AutoModelForCausalLM, config)


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_kernels_of_a_repository_are_refused(tmp_path: Path, key: str) -> None:
    write_language_model(tmp_path)
    change(tmp_path / "config.json", text_config={key: "owner/kernel"})
    with pytest.raises(ConfigError, match=r"takes attention from 'owner/kernel'"):
        check_model_folder(tmp_path, label="model.path")


def write_adapter(folder: Path) -> None:
    """Write an adapter that changes outputs into a model's folder, as trainers' checkpoints have both."""
    made = get_peft_model(tiny_model(0), LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"]))
    torch.nn.init.ones_(next(p for name, p in made.named_parameters() if "lora_B" in name))
    made.save_pretrained(folder)


def test_a_model_and_an_adapter_in_one_folder_are_refused_for_every_use(tmp_path: Path) -> None:
    data = texts_data(tmp_path)
    policy, critic = tmp_path / "lm", tmp_path / "critic"
    write_language_model(critic)
    sentiment = write_sentiment(tmp_path / "sentiment")
    for folder in (policy, critic, Path(sentiment)):
        write_adapter(folder)
    refused = r"holds an adapter \(adapter_config\.json\).*model\.lora\.start"
    for load in (
        lambda: CausalLM.load(policy, SETTINGS, frozenset(Part), {}),
        lambda: CriticLM.load(critic, SETTINGS, frozenset(Part), {}),
        lambda: make_reward("sequence_classification", {"model": sentiment, "label": 1}),
        lambda: check_config(RunConfig.model_validate(data)),
    ):
        with pytest.raises(ConfigError, match=refused):
            load()
    reward = {"name": "sequence_classification", "options": {"model": sentiment}}
    teacher = {"name": "opd", "options": {"teacher": str(critic)}}
    drawn = {"model": {"policy": "sd3", "path": str(tmp_path)}, "optimize": {"algorithm": teacher}}
    for changed, setting in (({"rewards": [reward]}, "rewards.0"), (drawn, "optimize.algorithm")):
        with pytest.raises(ConfigError, match=re.escape(setting) + r"\.options\.(model|teacher) '.*' " + refused):
            check_names(RunConfig.model_validate({**data, **changed}))


def test_an_adapter_in_a_component_is_refused(tiny_base: Path, tmp_path: Path) -> None:
    for file in ("model_index.json", "text_encoder/config.json"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_bytes((tiny_base / file).read_bytes())
    check_model_folder(tmp_path, label="model.path")
    (tmp_path / "text_encoder" / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"model\.path '.*text_encoder' holds an adapter"):
        check_model_folder(tmp_path, label="model.path")


@pytest.mark.campaign_cases("None")
@pytest.mark.slow_cases("text")
@pytest.mark.parametrize("value", ["text", None])
def test_a_value_of_another_type_is_followed_or_refused_in_one_sentence(
    tiny_base: Path, tmp_path: Path, value: Any
) -> None:
    """Each field of each file of settings, of a language model and of a pipeline."""
    data = texts_data(tmp_path)
    shutil.copytree(tiny_base, tmp_path / "pipeline", copy_function=os.symlink)
    drawn = RunConfig.model_validate(small_data(tmp_path, tmp_path / "pipeline"))
    outcomes = Counter[str]()
    for folder, check in (
        (tmp_path / "lm", lambda: load_everything(RunConfig.model_validate(data))),
        (tmp_path / "pipeline", lambda: check_model(RunPlan(drawn))),
    ):
        for file in [*folder.rglob("*config.json"), *folder.glob("model_index.json")]:
            original = file.read_text()
            file.unlink()
            for key in json.loads(original):
                file.write_text(json.dumps({**json.loads(original), key: value}))
                try:
                    check()
                    outcomes["followed"] += 1
                except ConfigError as error:
                    outcomes["refused" if len(str(error)) < 1200 else f"{file}: {key}"] += 1
            file.write_text(original)
        check()
    assert outcomes.keys() == {"followed", "refused"}
    assert min(outcomes.values()) > 30
    assert outcomes.total() > 150


def load_everything(config: RunConfig) -> None:
    folder = Path(str(config.model.path))
    check_folder(folder)
    check_vocabulary(folder)
    meta_language_model(language_config(str(folder)))


DEEP = '{"a":' * 100 + "1" + "}" * 100


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[" * 100_000 + "]" * 100_000, "is no JSON"),
        (DEEP, "nested more than 64 deep"),
        ('{"rope_theta": NaN}', "'rope_theta' has a number that is not finite"),
        ('{"a": {"b": [1, Infinity]}}', "'b' has a number that is not finite"),
        ('{"time_step_limit": [0.0, NaN]}', "'time_step_limit' has a number that is not finite"),
        ('{"eps": 1e999}', "'eps' has a number that is not finite"),
        ('{"size": ' + "9" * 400 + "}", "'size' has a number that is not finite"),
        ('{"size": ' + "9" * 5000 + "}", "is no JSON"),
        ("[1]", "is no JSON object"),
        ("{", "is no JSON"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "generation_config.json"])
def test_settings_of_others_are_bounded(tmp_path: Path, name: str, text: str, expected: str) -> None:
    write_language_model(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=expected):
        check_model_folder(tmp_path, label="model.path")


def test_files_of_others_have_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowmill.models.library_loading._MOST_BYTES", 10)
    (tmp_path / "config.json").write_text(json.dumps({"name": "long enough"}))
    with pytest.raises(ValueError, match="more than 10 bytes"):
        read_json(tmp_path / "config.json")
    with pytest.raises(ValueError, match="it is no file"):
        read_json(tmp_path)


def test_numbers_that_transformers_writes_are_read(tmp_path: Path) -> None:
    text = '{"model_max_length": 1000000000000000019884624838656, "time_step_limit": [0.0, Infinity]}'
    (tmp_path / "config.json").write_text(text)
    assert read_json(tmp_path / "config.json")["model_max_length"] == int(1e30)


@pytest.mark.parametrize("entry", ["../other.safetensors", "/etc/x", "a/b.safetensors", 3, None])
def test_an_index_lists_files_of_its_folder(tmp_path: Path, entry: Any) -> None:
    write_language_model(tmp_path)
    change(tmp_path / "model.safetensors.index.json", weight_map={"weight": entry})
    with pytest.raises(ConfigError, match=r"index\.json' says of 'weight' .*, not the name of a file next to it"):
        check_model_folder(tmp_path, label="model.path")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2])
def test_weights_that_are_no_numbers_are_found(value: float, dtype: torch.dtype) -> None:
    tensor = torch.arange(-3.0, 4.0).to(dtype)
    check_tensors({"fine": tensor, "whole": torch.arange(3), "none": torch.empty(0), "meta": tensor.to("meta")}, "x")
    tensor[5] = torch.tensor(value).to(dtype)
    with pytest.raises(ConfigError, match=r"^x holds weights that are no finite numbers \('broken'\)"):
        check_tensors({"fine": torch.ones(2), "broken": tensor}, "x")


def test_policies_critics_and_empty_models_refuse_nan_weights(tmp_path: Path) -> None:
    write_language_model(tmp_path)
    model = tiny_model(0)
    with torch.no_grad():
        list(model.parameters())[-2].view(-1)[3] = float("nan")
    model.save_pretrained(tmp_path)
    for load in (CausalLM.load, CriticLM.load):
        with pytest.raises(ConfigError, match="no finite numbers"):
            load(tmp_path, SETTINGS, frozenset(Part), {})
    targets = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    targets.pop("lm_head.weight", None)
    with pytest.raises(ConfigError, match="no finite numbers"):
        StoredWeights.of(tmp_path, model).read(targets)
    check_finite(tiny_model(0), "x")


def test_a_class_in_a_component_s_folder_is_refused(tiny_base: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_base, tmp_path / "pipeline")
    config = RunConfig.model_validate(small_data(tmp_path, tmp_path / "pipeline"))
    check_model(RunPlan(config))
    (tmp_path / "pipeline" / "vae" / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    change(tmp_path / "pipeline" / "model_index.json", vae=["own", "Own"])
    with pytest.raises(ConfigError, match=r"needs code of its own: its index takes 'vae' from vae/own\.py"):
        check_model(RunPlan(config))
    with pytest.raises(ConfigError, match="needs code of its own"):
        load_pretrained(DiffusionPipeline, tmp_path / "pipeline", label="model.path")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("setting", ["target_modules", "layers_pattern", "rank_pattern", "alpha_pattern"])
def test_regular_expressions_of_others_are_names(setting: str) -> None:
    for name in ("to_q", "layers.3.to_out.0", r"^blocks\.0\.ff$", "all-linear"):
        check_patterns({setting: name})
        check_patterns({setting: {name: 3}})
    with pytest.raises(ValueError, match="no name and no list of names"):
        check_patterns({setting: 3})
    for pattern in ("(a+)+$", ".*q_proj", "q|k", "[ab]", "x{3}"):
        for value in (pattern, [pattern], {pattern: 3}):
            with pytest.raises(ValueError, match=f"{setting} has .* is a regular expression"):
                check_patterns({setting: value})
