"""How a field of a request is specified on the command line; its type, default and description are the field's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo


@dataclass(frozen=True, slots=True)
class CommandLine:
    """How a field is specified, if not as the option ``--its-name``."""

    name: str | None = None
    """Another name of the option; without dashes, the name of a positional argument; empty: it cannot be specified."""
    metavar: str | None = None
    """Name of the value in help."""
    default: Any = ...
    """Default of the option, if it is not the field's; None: the command chooses the value."""


def command_line(name: str, field: FieldInfo) -> CommandLine:
    """Return how a field is specified, with the name and the default filled in."""
    option = next((each for each in field.metadata if isinstance(each, CommandLine)), CommandLine())
    default = option.default if option.default is not ... else None if field.default_factory else field.default
    return replace(option, name=f"--{name.replace('_', '-')}" if option.name is None else option.name, default=default)


def refusal(error: ValidationError) -> tuple[str, str]:
    """Return the first field that a request refuses, and the reason."""
    item = error.errors()[0]
    return str(item["loc"][0]), item["msg"].removeprefix("Value error, ")
