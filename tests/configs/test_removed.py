"""Settings and names that no longer exist are refused with what replaces them, and stored configs stay readable."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from functools import cache
from typing import Any, get_args

import pytest
from pydantic import BaseModel
from typer.main import get_command

import flowmill
from flowmill.configs.base import Section
from flowmill.configs.errors import ConfigError
from flowmill.configs.load import checked
from flowmill.configs.registry import Table, resolve
from flowmill.configs.schema import RunConfig
from flowmill.flows.cli import app
from flowmill.flows.cli.app import REMOVED


@cache
def tables() -> list[Table]:
    """Return the tables of components of all rooms."""
    names = [each.name for each in pkgutil.walk_packages(flowmill.__path__, "flowmill.") if each.ispkg]
    modules = map(importlib.import_module, names)
    return [value for module in modules for value in vars(module).values() if isinstance(value, Table)]


def removed_settings(schema: type[BaseModel], *path: str | int) -> Iterator[tuple[tuple[str | int, ...], str, object]]:
    """Yield the places of settings that no longer exist, what replaces each, and its default."""
    if issubclass(schema, Section):
        assert schema.former.keys() <= schema.removed.keys()
        yield from (((*path, name), instead, schema.former.get(name)) for name, instead in schema.removed.items())
    for name, field in schema.model_fields.items():
        inner, is_list = section_of(field.annotation)
        if inner is not None:
            yield from removed_settings(inner, *path, name, *((0,) if is_list else ()))


def section_of(annotation: Any) -> tuple[type[Section] | None, bool]:
    """Return the section of an annotation, and whether there is a list of them."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation, False
    inner = [section_of(each)[0] for each in get_args(annotation)]
    found = next((each for each in inner if each is not None), None)
    return found, Ellipsis in get_args(annotation)


SETTINGS = list(removed_settings(RunConfig))


def data_of(path: tuple[str | int, ...], value: object) -> dict[str, Any]:
    """Return the data of a config with one setting."""
    data: Any = value
    for part in reversed(path):
        data = [data] if part == 0 else {part: data}
    assert isinstance(data, dict)
    return data


@pytest.mark.parametrize("row", SETTINGS, ids=lambda row: ".".join(map(str, row[0])))
def test_a_setting_that_no_longer_exists_is_refused_with_its_replacement(row: tuple[Any, str, object]) -> None:
    path, instead, _ = row
    name = ".".join(map(str, path))
    with pytest.raises(ConfigError) as refused:
        checked(data_of(path, "value"), RunConfig, lambda mistake: "here")
    assert f"here: setting '{name}' no longer exists. {instead}" in str(refused.value)


@pytest.mark.parametrize("row", SETTINGS, ids=lambda row: ".".join(map(str, row[0])))
def test_stored_configs_may_name_it_without_a_value_or_at_its_default(row: tuple[Any, str, object]) -> None:
    for value in (None, False, row[2]):
        with pytest.raises(ConfigError) as refused:
            checked(data_of(row[0], value), RunConfig, lambda mistake: "here")
        assert row[0][-1] not in str(refused.value)


@pytest.mark.parametrize("name", REMOVED)
def test_commands_that_no_longer_exist_are_refused_with_their_replacement(name: str) -> None:
    group: Any = get_command(app)
    assert name not in group.commands
    with pytest.raises(ConfigError, match=f"^'flowmill {name}' no longer exists. "):
        group.make_context("flowmill", [name, "--help"]).command.invoke(group.make_context("flowmill", [name]))


def test_names_that_no_longer_exist_are_refused_with_their_replacement() -> None:
    removed = [(table, name) for table in tables() for name in table.removed]
    assert len(removed) >= 2
    for table, name in removed:
        assert name not in table
        with pytest.raises(ConfigError, match=f"table '{name}' no longer exists. "):
            resolve(table, name, label="table")
