from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowmill.configs import introspection
from flowmill.configs.errors import ConfigError
from flowmill.configs.fingerprint import canonical_json, fingerprint
from flowmill.configs.load import differences, flatten, load_config, merged, unlike
from flowmill.configs.presets import preset_files
from flowmill.configs.registry import option_names, resolve
from flowmill.configs.suggestions import near_path, nearest
from flowmill.flows.chained import chained
from flowmill.flows.requests import PipelineRequest
from flowmill.models.maths import KERNELS, PLANS, SOLVERS
from flowmill.models.quickstart import BUILDERS
from flowmill.models.rewards import REWARDS
from flowmill.storage.trajectories import TRAJECTORY_STORES
from flowmill.tasks.algorithms import ALGORITHMS

PRESETS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("rollout.group_sizes=4", "unknown setting 'rollout.group_sizes'. Did you mean 'group_size'"),
        ("rolout.steps=4", "Did you mean 'rollout'"),
        ("rewards.0.wieght=2", "Did you mean 'weight'"),
        ("model.lora.ranks=4", "Did you mean 'rank'"),
        ("rollout.group_size=many", "'rollout.group_size' is 'many'"),
        ("rollout.group_size=0", "greater than or equal to 1"),
        ("rollout.steps", "not of the form"),
        ("model.policy.x=1", "'model.policy' holds a value, not a section, so it has no 'x'"),
        ("optimize.lr=1", "Did you mean 'learning_rate'"),
        ("optimize.betas=[0.9,1]", "'optimize.betas.1' is 1; it must be less than 1"),
        ("optimize.wd=1", "Did you mean 'weight_decay'"),
        ("execution.bs=1", "'encode_batch_size' or 'micro_batch_size' or 'rollout_batch_size'?"),
        ("optimize.group_size=2", "Did you mean 'rollout.group_size'"),
        ("rollout.sampler=7", "it must be a name with options; give the name alone"),
        ("rewards=ocr", "'rewards' is 'ocr'; it must be a list like [a, b]"),
        ("rewards.0=7", "'rewards.0' is 7; it must be a name with options"),
        ("rewards.first.name=ocr", "'first' must be a list index below 1. To add or remove entries give the whole"),
        ("prompts.train=[1]", "'prompts.train.0' is 1; it must be a valid string"),
        ("optimize.betas=0.9", "'optimize.betas' is 0.9; it must be a list like [a, b]"),
        ("rewards=[", "'[' is not a YAML value. Quote lists and mappings for the shell: --set 'rewards=[...]'"),
        ("advantage=3", "'advantage' is 3; it must be a section with keys"),
        ("rewards.7.name=ocr", "must be a list index below 1"),
        ("model.path=somewhere", "exactly one of 'path'"),
    ],
)
def test_mistakes_are_named_with_the_remedy(override: str, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(PRESETS[0], [override])
    assert expected in str(error.value)
    assert str(error.value).startswith("--set ")
    assert len(str(error.value).splitlines()) == 1


def test_the_file_is_blamed_for_its_own_mistakes_and_the_flag_for_its(tmp_path: Path) -> None:
    digits = next(p for p in PRESETS if p.stem == "digits")
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"extends: {digits}\nrollout: {{group_sizes: 4}}\n")
    with pytest.raises(ConfigError) as error:
        load_config(mine, ["rollout.steps=0", "run.seed=3"])
    first, second = sorted(str(error.value).splitlines())
    assert first.startswith("--set rollout.steps=0: 'rollout.steps' is 0; ")
    assert second.startswith(f"{mine}: unknown setting 'rollout.group_sizes'. Did you mean 'group_size'?")
    with pytest.raises(ConfigError, match=r"^--set rollout\.steps=0: ") as later:
        load_config(digits, ["rollout.steps=4", "rollout.steps=0"])
    assert "rollout.steps=4" not in str(later.value)


def test_a_config_that_does_not_exist_names_its_neighbor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "settings").mkdir()
    (tmp_path / "settings" / "digits.yaml").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"Did you mean 'settings/digits\.yaml'\?"):
        load_config("setings/digit.yaml")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("lr", ["learning_rate"]),
        ("learnign_rate", ["learning_rate"]),
        ("gs", ["group_size"]),
        ("size", ["group_size"]),
        ("max_norm", ["max_grad_norm"]),
        ("Group-Size", ["group_size"]),
        ("eps", ["epsilon"]),
        ("rgpo", ["grpo"]),
        ("zzz", []),
        ("", []),
    ],
)
def test_the_nearest_name(name: str, expected: list[str]) -> None:
    valid = ["learning_rate", "group_size", "max_grad_norm", "epsilon", "grpo"]
    assert nearest(name, valid) == expected


def test_the_nearest_path(tmp_path: Path) -> None:
    (tmp_path / "my-model").mkdir()
    (tmp_path / "my-model" / "weights.bin").touch()
    (tmp_path / "my-modle.txt").touch()
    assert near_path("my-modle", [tmp_path], only_folders=True) == "my-model"
    assert near_path("my_modl/weight.bin", [tmp_path]) == "my-model/weights.bin"
    assert near_path(str(tmp_path / "my-mod"), [], only_folders=True) is None
    assert near_path(str(tmp_path / "my-mod"), [tmp_path], only_folders=True) == str(tmp_path / "my-model")
    assert near_path("something-else", [tmp_path]) is None


def test_a_home_folder_is_meant_by_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "train.txt").write_text("a\n")
    digits = next(p for p in PRESETS if p.stem == "digits")
    assert load_config(digits, ["prompts.train=~/train.txt"]).prompts.train == str(tmp_path / "train.txt")


TABLES = {
    "flowmill.models.quickstart:BUILDERS": BUILDERS,
    "flowmill.models.rewards:REWARDS": REWARDS,
    "flowmill.models.maths:PLANS": PLANS,
    "flowmill.models.maths:SOLVERS": SOLVERS,
    "flowmill.models.maths:KERNELS": KERNELS,
    "flowmill.storage.trajectories:TRAJECTORY_STORES": TRAJECTORY_STORES,
    "flowmill.tasks.algorithms:ALGORITHMS": ALGORITHMS,
}


@pytest.mark.parametrize("name", TABLES)
def test_what_is_read_from_the_text_is_what_is_imported(name: str) -> None:
    assert introspection.table(name) == TABLES[name]
    for entry, import_string in TABLES[name].items():
        found = introspection.options(import_string)
        assert found is not None
        assert sorted(found) == sorted(option_names(resolve(TABLES[name], entry, label="entry")))


def test_text_that_does_not_tell_is_left_to_the_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "unclear_text.py").write_text(
        "class Open:\n    def __init__(self, **options):\n        pass\n\n\n"
        "class Plain:\n    def __init__(self, scale=1.0):\n        pass\n\n\n"
        "class Below(Plain, metaclass=type):\n    pass\n"
    )
    assert introspection.options("unclear_text:Open") is None
    assert list(introspection.options("unclear_text:Plain") or ()) == ["scale"]
    assert introspection.options("unclear_text:Below") is None
    (tmp_path / "latin_text.py").write_bytes(
        b"class Plain:\n    def __init__(self, scale=1.0):\n        self.word = '\xe9'\n"
    )
    assert introspection.options("latin_text:Plain") is None
    assert introspection.find_module("unclear_text.deeper") is None
    assert introspection.find_module("no_such_module_at_all.x") is None


def test_missing_and_malformed_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(tmp_path / "no.yaml")
    (tmp_path / "bad.yaml").write_text("model: [")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_config(tmp_path / "bad.yaml")
    (tmp_path / "twice.yaml").write_text("extends: digits\nrun: {seed: 7}\nmodel: {}\nrun: {epochs: 2}\n")
    with pytest.raises(ConfigError, match="'run' is there twice, in lines 2 and 4"):
        load_config(tmp_path / "twice.yaml")
    # A merged mapping has keys of its own that others replace, wherever it is used.
    (tmp_path / "merge.yaml").write_text(
        "extends: digits\nrun: &run {seed: 7, epochs: 2}\n"
        "rewards: [{name: ocr, options: {a: &a {<<: *run, seed: 8}}}]\n"
        "rollout: {plan: {name: all, options: {<<: *a}}}\n"
    )
    assert load_config(tmp_path / "merge.yaml").rewards[0].options == {"a": {"seed": 8, "epochs": 2}}
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(ConfigError, match="not sections"):
        load_config(tmp_path / "list.yaml")


def test_paths_in_overrides_are_those_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here.txt").write_text("a\n")
    monkeypatch.chdir(tmp_path)
    digits = next(p for p in PRESETS if p.stem == "digits")
    assert load_config(digits, ["prompts.train=here.txt"]).prompts.train == str(tmp_path / "here.txt")


def test_a_config_may_extend_another(tmp_path: Path) -> None:
    digits = next(p for p in PRESETS if p.stem == "digits")
    (tmp_path / "mine.yaml").write_text(
        f"extends: {digits}\noptimize: {{learning_rate: 1.0e-5}}\nrollout: {{sampler: {{name: cps}}}}\n"
    )
    mine, base = load_config(tmp_path / "mine.yaml"), load_config(digits)
    assert (mine.run.name, mine.optimize.learning_rate) == ("mine", 1e-5)
    assert mine.optimize.betas == base.optimize.betas
    assert mine.rollout.sampler.options == {}
    assert mine.rollout.steps == base.rollout.steps
    assert mine.prompts == base.prompts
    (tmp_path / "loop.yaml").write_text("extends: loop.yaml\n")
    with pytest.raises(ConfigError, match="extends itself"):
        load_config(tmp_path / "loop.yaml")


@pytest.mark.parametrize(
    ("where", "stays"),
    [
        ("run", {"seed": 7}),
        ("optimize.schedule", {"warmup_updates": 5}),
        ("model.quantize", {"text_encoders": "int8"}),
        ("optimize.algorithm", {}),
        ("model.build", {}),
    ],
)
def test_a_change_with_a_name_replaces_components_alone(where: str, stays: dict[str, Any]) -> None:
    part, _, setting = where.rpartition(".")
    base, changes = stays or {"name": "nft", "options": {"beta": 1.0}}, {"name": "grpo"}
    whole = merged(*({part: {setting: each}} if part else {setting: each} for each in (base, changes)))
    assert (whole[part][setting] if part else whole[setting]) == {**stays, "name": "grpo"}


def test_presets_are_known_by_name_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the config of a command, as the one that a config extends, and as that of the run it starts from."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    mine = tmp_path / "sub" / "mine.yaml"
    mine.write_text("extends: digits\nmodel: {start: digits@3, start_config: digits}\nrun: {epochs: 2}\n")
    config, preset = load_config(mine), load_config("digits")
    assert (config.rollout, config.prompts, config.run.epochs) == (preset.rollout, preset.prompts, 2)
    assert load_config(str(config.model.start_config)) == preset
    assert load_config("digits", ["model.start=digits@3", "model.start_config=digits"]).model == config.model
    # A folder hides no preset, a file does.
    (tmp_path / "digits").mkdir()
    assert load_config("digits") == preset
    (tmp_path / "sub" / "digits.yaml").write_text("extends: digits_crd\n")
    mine.write_text("extends: digits.yaml\n")
    assert load_config(mine).optimize == load_config("digits_crd").optimize


def test_what_is_no_preset_names_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mine = tmp_path / "mine.yaml"
    mine.write_text("extends: digts\n")
    meant = r"does not exist\. Did you mean 'digits'\? 'flowmill presets' lists the configs that come with flowmill\.$"
    for config, said in (("digts", "Config file 'digts' "), (mine, f"Config file '{mine}' extends 'digts', which ")):
        with pytest.raises(ConfigError, match=f"^{re.escape(said)}{meant}"):
            load_config(config)
    mine.write_text("extends: digits\nmodel: {start: digits@3, start_config: digts}\n")
    with pytest.raises(ConfigError, match=f"^model.start_config 'digts' {meant}"):
        chained(PipelineRequest(config=str(mine), root=str(tmp_path / "store")))
    with pytest.raises(ConfigError, match=r"^There is no preset 'digts'\. Did you mean 'digits'.*'flowmill presets'"):
        preset_files("digts")


def test_modules_next_to_a_config_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Like its prompts; the config says where they are, for commands that have the run alone."""
    folders = [tmp_path / name for name in ("here", "project", "lib")]
    for folder in folders:
        folder.mkdir()
    here, project, lib = folders
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (project / "next_under_test.py").write_text("def red(media, prompts, metadata):\n    return [0.0] * len(media)\n")
    mine = project / "mine.yaml"
    mine.write_text("extends: digits\nrewards: [{name: 'next_under_test:red'}]\nexecution: {modules: [../lib]}\n")
    config = load_config(mine)
    assert config.execution.modules == (str(lib), str(project))
    assert sys.path[-2:] == [str(lib), str(project)], "searched last"
    assert callable(resolve(REWARDS, config.rewards[0].name, label="reward"))
    assert load_config("digits").execution.modules == (), "a preset has none"
    monkeypatch.chdir(project)
    assert load_config("digits", ["rewards=[next_under_test:red]"]).execution.modules == (str(project),)
    assert differences(load_config(mine).model_dump(mode="json"), config.model_dump(mode="json")) == []


def test_overrides_reach_every_kind_of_value() -> None:
    path = next(p for p in PRESETS if p.stem == "digits")
    overrides = ["optimize.learning_rate=1e-3", "run.seed=7", "rewards=[{name: ocr}]", "optimize.ema.decay=0.5"]
    config = load_config(path, overrides)
    assert (config.optimize.learning_rate, config.run.seed, config.rewards[0].name) == (1e-3, 7, "ocr")
    assert config.optimize.ema is not None
    assert config.optimize.ema.decay == 0.5
    assert load_config(path, ["optimize.algorithm.options.clip_range=2e-3"]).optimize.algorithm.options == {
        "clip_range": 0.002
    }


def test_differences_ignore_what_does_not_change_results() -> None:
    path = next(p for p in PRESETS if p.stem == "digits")
    base = load_config(path).model_dump(mode="json")
    free = load_config(path, ["run.epochs=99", "execution.processes=2", "evaluate.samples=1"]).model_dump(mode="json")
    assert differences(base, free) == []
    other = load_config(path, ["optimize.learning_rate=1"]).model_dump(mode="json")
    assert differences(base, other) == ["optimize.learning_rate: 0.0003 -> 1.0"]


def test_a_setting_with_parts_differs_in_its_parts_alone() -> None:
    path = next(p for p in PRESETS if p.stem == "digits")
    plain, acting = (flatten(load_config(path, each).model_dump(mode="json")) for each in ([], ["watch.on.kl=stop"]))
    assert unlike(plain, acting) == {"watch.on.kl": (None, "stop")}
    assert unlike(acting, plain, plain, missing="") == {"watch.on.kl": ("stop", "", "")}
    assert unlike({"a": {}, "b": [], "c": []}, {"b.0": 1, "b.1": 2, "c": None}) == {
        "a": ({}, None),
        "b.0": (None, 1),
        "b.1": (None, 2),
        "c": ([], None),
    }


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=30)
@given(st.dictionaries(st.text(), JSON))
def test_fingerprint_ignores_key_order_and_number_spelling(data: dict[str, Any]) -> None:
    assert fingerprint(data) == fingerprint(dict(reversed(data.items())))


def test_fingerprint_is_what_it_was() -> None:
    # A change here orphans every store in existence.
    assert canonical_json({"b": [1.0, 0.5], "a": None}) == '{"a":null,"b":[1,0.5]}'
    assert fingerprint({"b": [1.0, 0.5], "a": None}) == "a17a1ecae6f3eec7c5a22ec4a4441fb1"
    with pytest.raises(ValueError, match="no JSON form"):
        fingerprint(float("nan"))
