"""Every setting, command and family is used: by a preset, or by the docs in code that tests run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

import flowmill
from flowmill.configs.base import Component, Section
from flowmill.configs.errors import FlowmillError
from flowmill.configs.load import load_config, read_config
from flowmill.configs.model_families import FAMILIES
from flowmill.configs.overrides import apply_overrides
from flowmill.configs.presets import presets
from flowmill.configs.schema import RunConfig
from flowmill.tasks.checks.check import check_config
from pages import command_page
from tests.conftest import ROOT

#: A setting by the section that states it: rewards, monitors and judges have the same ones.
Setting = tuple[type[Section], str]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
#: Settings that nobody writes, and why.
WRITTEN_BY_PROGRAMS = {
    "tracking.parent": "flowmill sweep gives it to its runs",
    "execution.sources": "flowmill.train carries the source of functions in it",
}
#: Presets that fragments are merged into, the first that takes one: images, clips, texts, given data, several ranks.
PLAIN = "tiny_sd3 tiny_wan21 addition_grpo addition_ppo digits_sft digits_reward_gradient tiny_enhancer".split()
RANKS = {"execution": {"processes": 8, "strategy": "fsdp"}, "advantage": {"kl_coef": 0.1}, "monitors": ["diversity"]}
TRIED: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in (*PLAIN, "tiny_qwen_image_edit")]
GUIDED = {"model": {"guidance_scale": 4.5}, "optimize": {"guidance_gradient": "conditional"}}
TRIED += [("tiny_flux1", RANKS), ("tiny_sd3", GUIDED)]
#: What a fragment may lack here: files, modules and packages of its reader.
LACKING = re.compile(
    r"is no safetensors file|is no folder|\w+\.(jsonl?|csv|txt)' does not exist|'my_\w+' cannot be imported|pip install"
)
#: A word in place of a value.
PLACEHOLDER = re.compile(r"\.\.\.|\b[A-Z]+\b(?!:)|\b[a-z]$|=")


def sections_in(annotation: Any) -> Iterator[type[Section]]:
    """Yield the sections of an annotation, but for components, whose options are their own."""
    if isinstance(annotation, type) and issubclass(annotation, Section) and annotation is not Component:
        yield annotation
    for inner in get_args(annotation):
        yield from sections_in(inner)


def setting_of(section: type[Section], name: str) -> Setting:
    return next(each for each in section.__mro__ if name in vars(each).get("__annotations__", {})), name


def settings(section: type[Section] = RunConfig, above: str = "") -> Iterator[tuple[Setting, str]]:
    """Yield the settings below a section with their places; a section itself is used by what it has."""
    for name, field in section.model_fields.items():
        inner = [*sections_in(field.annotation)]
        for each in inner:
            yield from settings(each, f"{above}{name}.")
        if not inner:
            yield setting_of(section, name), f"{above}{name}"


def used_by(data: Any, section: type[Section] = RunConfig) -> Iterator[Setting]:
    """Yield the settings that data of a section have."""
    for name, value in data.items() if isinstance(data, dict) else ():
        if name in section.model_fields:
            yield setting_of(section, name)
            for inner in sections_in(section.model_fields[name].annotation):
                for each in value if isinstance(value, list) else [value]:
                    yield from used_by(each, inner)


def blocks(page: Path, language: str) -> list[str]:
    """Return the blocks of a page that tests run."""
    return re.findall(rf"(?<!<!-- shown -->\n)```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def executed() -> Iterator[Setting]:
    """Yield the settings of the code in the docs that tests/test_docs.py runs."""
    for page in PAGES:
        for block in blocks(page, "bash"):
            for written in re.findall(r"<<'YAML'\n(.*?)\nYAML|^echo '(\{.*?\})'", block, re.DOTALL | re.MULTILINE):
                yield from used_by(yaml.safe_load("".join(written)))
            for override in re.findall(r"--set ('.*?'|\S+)", block):
                yield from used_by(apply_overrides({}, [override.strip("'")]))
        for block in blocks(page, "python"):
            for call in ast.walk(ast.parse(block)):
                if isinstance(call, ast.Call) and ast.unparse(call.func).removeprefix("flowmill.") in flowmill.__all__:
                    name = ast.unparse(call.func).removeprefix("flowmill.").lower()
                    yield from used_by({name: {each.arg: None for each in call.keywords}})


@cache
def fragments() -> dict[str, dict[str, Any]]:
    """Return parts of configs in the docs, by place: blocks of YAML, and code like ``execution.retries: 5``."""
    found = {}
    for page in PAGES:
        for block in blocks(page, "yaml"):
            if isinstance(data := yaml.safe_load(block), dict) and data.keys() <= RunConfig.model_fields.keys():
                found[f"{page.stem}: {block.strip()}"] = data
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for code in re.findall(r"`([^`]+)`|--set \"(.+?)\"", text):
            code = "".join(code)
            setting = re.fullmatch(r"(\w+)((?:\.\w+)+|(?==|: [{\[]))(?:=|: )(.+)", " ".join(code.split()))
            if setting and setting[1] in RunConfig.model_fields and not PLACEHOLDER.search(setting[3]):
                found[f"{page.stem}: {setting[0]}"] = apply_overrides({}, [f"{setting[1]}{setting[2]}={setting[3]}"])
    return found


@pytest.mark.parametrize("place", fragments())
def test_a_fragment_of_the_docs_works_with_a_preset(place: str, tmp_path: Path) -> None:
    said, data = [], fragments()[place]
    # One of two ways replaces the other.
    instead = {"model": {"build": None}} if "path" in data.get("model", {}) else {}
    instead |= {"prompts": {"train": None, "heldout": None}} if "sources" in data.get("prompts", {}) else {}
    instead |= {"data": None} if "train" in data.get("data", {}) else {}
    for preset, settings in TRIED:
        (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"extends": f"{preset}.yaml", **settings, **instead}))
        (tmp_path / "part.yaml").write_text(yaml.safe_dump({"extends": "mine.yaml", **data}))
        try:
            check_config(load_config(tmp_path / "part.yaml"), rewards=False)
            return
        except FlowmillError as error:
            said.append(f"{preset}: {error}")
    assert any(map(LACKING.search, said)), "\n".join(said)


def test_every_setting_is_used_by_a_preset_or_the_docs() -> None:
    used = {each for name in presets() for each in used_by(read_config(ROOT / "configs" / f"{name}.yaml"))}
    used |= {*executed()} | {each for data in fragments().values() for each in used_by(data)}
    unused = {setting: place for setting, place in reversed([*settings()]) if setting not in used}
    assert sorted(unused.values()) == sorted(WRITTEN_BY_PROGRAMS)


def test_every_family_is_used_by_a_preset() -> None:
    policies = {load_config(name).model.policy for name in presets()}
    assert {*FAMILIES} - policies == set()


def test_every_command_is_used_by_the_docs() -> None:
    text = "".join(page.read_text() for page in PAGES)
    assert [name for name in command_page.commands() if not re.search(rf"{name}\b", text)] == []
