from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from configs.errors import ConfigError
from configs.fingerprint import canonical_json, fingerprint
from configs.load import differences, dump_yaml, load_config, parse_config
from configs.schema import RunConfig

PRESETS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_presets_parse_and_survive_a_round_trip(path: Path) -> None:
    import yaml

    config = load_config(path)
    assert config.run.name == path.stem
    assert parse_config(yaml.safe_load(dump_yaml(config)), where="dump") == config
    assert Path(config.prompts.train).is_absolute()


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
        ("model.policy.x=1", "holds a value, not a section"),
        ("rewards.7.name=ocr", "must be a list index below 1"),
        ("model.path=somewhere", "exactly one of 'path'"),
    ],
)
def test_mistakes_are_named_with_the_remedy(override: str, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(PRESETS[0], [override])
    assert expected in str(error.value)


def test_missing_and_malformed_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(tmp_path / "no.yaml")
    (tmp_path / "bad.yaml").write_text("model: [")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_config(tmp_path / "bad.yaml")
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


def sections(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield model
    for field in model.model_fields.values():
        for inner in (field.annotation, *get_args(field.annotation)):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from sections(inner)


def test_every_setting_is_documented() -> None:
    undocumented = [
        f"{section.__name__}.{name}"
        for section in sections(RunConfig)
        for name, field in section.model_fields.items()
        if not field.description
    ]
    assert not undocumented


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(st.dictionaries(st.text(), JSON))
def test_fingerprint_ignores_key_order_and_number_spelling(data: dict[str, Any]) -> None:
    assert fingerprint(data) == fingerprint(dict(reversed(data.items())))


def test_fingerprint_is_what_it_was() -> None:
    # A change here orphans every store in existence.
    assert canonical_json({"b": [1.0, 0.5], "a": None}) == '{"a":null,"b":[1,0.5]}'
    assert fingerprint({"b": [1.0, 0.5], "a": None}) == "a17a1ecae6f3eec7c5a22ec4a4441fb1"
    with pytest.raises(ValueError, match="no JSON form"):
        fingerprint(float("nan"))
