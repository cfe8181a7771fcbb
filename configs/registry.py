"""Tables of components: a name leads to an import string, an import string to a class, options to its dataclass."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from configs.errors import ConfigError
from configs.suggest import did_you_mean


def resolve(table: Mapping[str, str], name: str, *, what: str) -> Any:
    """Return the object a table entry, or an import string ``package.module:Class``, stands for.

    Raises:
        ConfigError: the name is not in the table, or the import string leads nowhere.
    """
    if name not in table and ":" not in name:
        raise ConfigError(f"{what} '{name}' does not exist. {did_you_mean(name, table)}")
    module_name, _, attribute = table.get(name, name).partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{what} '{name}': module '{error.name}' cannot be imported. Install it, or add the folder of your own "
            "module to PYTHONPATH."
        ) from None
    if not hasattr(module, attribute):
        raise ConfigError(f"{what} '{name}': module '{module_name}' has no '{attribute}'.")
    return getattr(module, attribute)


def create(table: Mapping[str, str], name: str, options: Mapping[str, Any], *, what: str) -> Any:
    """Return an instance of a component, built from its options.

    Raises:
        ConfigError: the component does not exist, or an option is unknown, missing or refused by the component.
    """
    component = resolve(table, name, what=what)
    valid = option_names(component)
    for option in options:
        if option not in valid:
            raise ConfigError(f"{what} '{name}' has no option '{option}'. {did_you_mean(option, valid)}")
    try:
        return component(**options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what} '{name}': {error}") from None


def option_names(component: Any) -> list[str]:
    """Return the names of a component's options."""
    if dataclasses.is_dataclass(component):
        return [field.name for field in dataclasses.fields(component) if field.init]
    return list(inspect.signature(component).parameters)
