"""Tables of components: a name leads to an import string, an import string to a class, options to its dataclass."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from configs.errors import ConfigError
from configs.packages import shadows
from configs.section import Component
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
        raise missing_module(name, error.name or module_name, what=what) from None
    except (ImportError, SyntaxError) as error:
        raise ConfigError(
            f"{what} '{name}': module '{module_name}' cannot be imported: {type(error).__name__}: {error}."
        ) from error
    if not hasattr(module, attribute):
        raise missing_attribute(name, module_name, attribute, what=what)
    return getattr(module, attribute)


def missing_module(name: str, module: str, *, what: str) -> ConfigError:
    """Return the error for an import string whose module, or a module it needs, is nowhere."""
    hidden = shadows(module) if ":" in name else None
    if hidden is not None:
        return ConfigError(f"{what} '{name}': {hidden}")
    return ConfigError(
        f"{what} '{name}': module '{module}' cannot be imported. Install it, or add the folder of your own "
        "module to PYTHONPATH."
    )


def missing_attribute(name: str, module: str, attribute: str, *, what: str) -> ConfigError:
    """Return the error for an import string whose module lacks what it names."""
    hidden = shadows(module) if ":" in name else None
    found = hidden if hidden is not None else f"module '{module}' has no '{attribute}'."
    return ConfigError(f"{what} '{name}': {found}")


def unknown_option(name: str, option: str, valid: Iterable[str], *, what: str) -> ConfigError:
    """Return the error for an option a component does not have."""
    return ConfigError(f"{what} '{name}' has no option '{option}'. {did_you_mean(option, valid)}")


def check_options(name: str, options: Iterable[str], valid: Sequence[str], *, what: str) -> None:
    """Check that a component has all options it is given.

    Raises:
        ConfigError: it lacks one.
    """
    for option in options:
        if option not in valid:
            raise unknown_option(name, option, valid, what=what)


def create(table: Mapping[str, str], name: str, options: Mapping[str, Any], *, what: str) -> Any:
    """Return an instance of a component, built from its options.

    Raises:
        ConfigError: the component does not exist, or an option is unknown, missing or refused by the component.
    """
    component = resolve(table, name, what=what)
    check_options(name, options, option_names(component), what=what)
    try:
        return component(**options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what} '{name}': {error}") from None


def chosen(table: Mapping[str, str], component: Component, *, what: str) -> Any:
    """Return an instance of the component that a config names, with its options; see ``create``."""
    return create(table, component.name, component.options, what=what)


def option_names(component: Any) -> list[str]:
    """Return the names of a component's options."""
    if dataclasses.is_dataclass(component):
        return [field.name for field in dataclasses.fields(component) if field.init]
    return list(inspect.signature(component).parameters)
