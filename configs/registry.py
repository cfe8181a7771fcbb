"""Tables of components: they resolve names to import strings and classes, and build instances from options."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from types import MappingProxyType, SimpleNamespace
from typing import Any, get_args, get_type_hints

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError

from flowmill.configs.base import Component
from flowmill.configs.errors import ConfigError
from flowmill.configs.exits import without_exits
from flowmill.configs.introspection import find_module
from flowmill.configs.suggestions import did_you_mean
from flowmill.configs.validation_messages import place, relevant, requirement

#: The package that all of flowmill's modules are in.
_OWN = __name__.partition(".")[0]


class Table(dict[str, str]):
    """Names and import strings of components, and the interface that a custom component must have."""

    def __init__(
        self,
        entries: Mapping[str, str],
        *,
        like: str,
        functions: bool = False,
        removed: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Make a table.

        Args:
            entries: import string by name.
            like: import string of the protocol or base class that a custom class must implement.
            functions: whether a custom component may be a function.
            removed: names that no longer exist, and what to do instead.
        """
        super().__init__(entries)
        self.like, self.functions, self.removed = like, functions, removed


def resolve(table: Table, name: str, *, label: str) -> Any:
    """Return the class of a table entry, or of an import string ``package.module:Class``."""
    if name not in table and ":" not in name:
        raise unknown(table, name, label=label)
    if name in table:
        return _imported(table[name], name, label=label)
    component = _imported(name, name, label=label)
    _check_like(component, table, name, label=label)
    return component


def unknown(table: Mapping[str, str], name: str, *, label: str) -> ConfigError:
    """Return the error for a name that a table does not have."""
    if isinstance(table, Table) and name in table.removed:
        return ConfigError(f"{label} '{name}' no longer exists. {table.removed[name]}")
    return ConfigError(f"{label} '{name}' does not exist. {did_you_mean(name, table)}")


def imported(import_string: str, *, label: str) -> Any:
    """Return the object of an import string in flowmill's own code."""
    return _imported(import_string, import_string, label=label)


def _imported(import_string: str, name: str, *, label: str) -> Any:
    module_name, _, attribute = import_string.partition(":")
    try:
        with without_exits(f"{label} '{name}'", ConfigError):
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise missing_module(name, error.name or module_name, label=label) from None
    except Exception as error:
        raise ConfigError(
            f"{label} '{name}': module '{module_name}' cannot be imported: {type(error).__name__}: {error}."
        ) from error
    if not hasattr(module, attribute):
        raise missing_attribute(name, module_name, attribute, label=label)
    return getattr(module, attribute)


def _check_like(component: Any, table: Table, name: str, *, label: str) -> None:
    """Check that a custom component has the table's interface, before it is called."""
    if table.functions and inspect.isfunction(component):
        return
    methods = _methods(table.like)
    if inspect.isclass(component) and all(callable(getattr(component, method, None)) for method in methods):
        return
    kind = f"the class {component.__name__}" if inspect.isclass(component) else f"of type {type(component).__name__}"
    alternative = " or a function" if table.functions else ""
    raise ConfigError(
        f"{label} '{name}' is {kind}; it must be a class with {', '.join(methods)}{alternative}, like '{table.like}'."
    )


def _methods(interface: str) -> list[str]:
    """Return the names of the methods that a protocol or base class requires."""
    module, _, name = interface.partition(":")
    base = getattr(importlib.import_module(module), name)
    names = getattr(base, "__abstractmethods__", None) or [name for name in vars(base) if not name.startswith("_")]
    return sorted(name for name in names if callable(getattr(base, name)))


def missing_module(name: str, module: str, *, label: str) -> ConfigError:
    """Return the error for an import string whose module, or a module it imports, is missing."""
    meant = [each for each in (name.partition(":")[0], module) if find_module(f"{_OWN}.{each}")]
    own = f" flowmill's own is named '{_OWN}.{meant[0]}'." if meant else ""
    return ConfigError(
        f"{label} '{name}': module '{module}' cannot be imported.{own} Install it, or put your own module next to the "
        "config or into the working directory."
    )


def missing_attribute(name: str, module: str, attribute: str, *, label: str) -> ConfigError:
    """Return the error for an import string whose module lacks the attribute."""
    return ConfigError(f"{label} '{name}': module '{module}' has no '{attribute}'.")


def unknown_option(name: str, option: str, valid: Iterable[str], *, label: str) -> ConfigError:
    """Return the error for an option a component does not have."""
    return ConfigError(f"{label} '{name}' has no option '{option}'. {did_you_mean(option, valid)}")


def check_options(
    component: Any, name: str, options: Mapping[str, Any], *, label: str, valid: Sequence[str] | None = None
) -> None:
    """Check that a component has all these options, and that their values have the annotated types.

    Types are strict, except that an integer is a number and a list is a tuple. Values are not converted.

    Args:
        component: a dataclass, another class or a function.
        name: its name in messages.
        options: values by name.
        label: its role in messages.
        valid: names of its options; None: all its fields or parameters.
    """
    accepted = option_names(component) if valid is None else valid
    for option, value in options.items():
        if option not in accepted:
            raise unknown_option(name, option, accepted, label=label)
        kind, adapter = _type_of(component, option)
        try:
            # Validated as JSON, in which a tuple is a list, like in YAML.
            adapter.validate_json(json.dumps(value, default=str))
        except ValidationError as error:
            raise ConfigError(f"{label} '{name}': {_refusal(option, kind, error)}") from None


def _refusal(option: str, kind: Any, error: ValidationError) -> str:
    """Return the option or the part of it that is refused, its value, the allowed values and a remedy."""
    first, *others = relevant(error.errors(include_url=False))
    where = place(first)
    # A value that no member of a union allows has an error for each member.
    allowed = dict.fromkeys(requirement(item) for item in (first, *others) if place(item) == where)
    noted = [note for each in (kind, *get_args(kind)) for note in getattr(each, "__metadata__", ())]
    remedies = [each for each in noted if isinstance(each, str)]
    path = ".".join(str(part) for part in (option, *where[: -1 if first["type"] == "missing" else None]))
    return " ".join([f"{path} is {first['input']!r}; {' or '.join(allowed)}.", *remedies])


@cache
def _type_of(component: Any, option: str) -> tuple[Any, TypeAdapter[Any]]:
    """Return the type of an option, and its check.

    A type that is not annotated, cannot be evaluated here or is unknown to pydantic allows all values.
    """
    parameter = inspect.signature(component).parameters.get(option)
    if parameter is None or parameter.annotation is parameter.empty:
        return Any, TypeAdapter(Any)
    if dataclasses.is_dataclass(component):
        owners = component.__mro__  # type: ignore[union-attr]
        names = next(vars(sys.modules[base.__module__]) for base in owners if option in inspect.get_annotations(base))
    else:
        names = getattr(component.__init__ if inspect.isclass(component) else component, "__globals__", {})
    try:
        # Evaluated one by one: other annotations may name types that are imported for type checkers only.
        holder = SimpleNamespace(__annotations__={option: parameter.annotation})
        kind = get_type_hints(holder, names, include_extras=True)[option]
        return kind, TypeAdapter(kind, config=ConfigDict(strict=True, allow_inf_nan=False))
    except (NameError, AttributeError, TypeError, SyntaxError, PydanticUserError):
        return Any, TypeAdapter(Any)


def create(table: Table, name: str, options: Mapping[str, Any], *, label: str) -> Any:
    """Return an instance of a component, built from its options."""
    return build(resolve(table, name, label=label), name, options, label=label)


def build(component: Callable[..., Any], name: str, options: Mapping[str, Any], *, label: str) -> Any:
    """Return an instance of a class, built from its options."""
    check_options(component, name, options, label=label)
    try:
        with without_exits(f"{label} '{name}'", ConfigError):
            return component(**options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{label} '{name}': {error}") from None


def chosen(table: Table, component: Component, *, label: str) -> Any:
    """Return an instance of the component that a config names, with its options; see ``create``."""
    return create(table, component.name, component.options, label=label)


def option_names(component: Any) -> list[str]:
    """Return the names of a component's options."""
    if dataclasses.is_dataclass(component):
        return [field.name for field in dataclasses.fields(component) if field.init]
    return list(inspect.signature(component).parameters)
