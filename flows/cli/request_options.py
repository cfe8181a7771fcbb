"""Options that are the fields of a request."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, signature
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from flowmill.configs.command_options import CommandLine, command_line, refusal
from flowmill.configs.exits import without_exits

_LIMITS = (("min", "ge"), ("max", "le"))


def with_options(function: Callable[..., None]) -> Callable[..., None]:
    """Return the function of a command with an option for every field of its ``request``, if it takes one.

    Code of the user's that it calls cannot end the process without a message.

    Type, default, limits and help of an option are those of the field; see ``flowmill.configs.command_options`` for
    its name.

    Args:
        function: its parameters are options, but for ``request``, a pydantic model.
    """
    hints = get_type_hints(function, include_extras=True)
    request: Any = hints.get("request")
    lines = {name: command_line(name, field) for name, field in request.model_fields.items()} if request else {}
    fields = {name: _parameter(name, request.model_fields[name], line) for name, line in lines.items() if line.name}

    def called(**options: Any) -> None:
        """Call the function with the request; absent options have the defaults of its fields."""
        values = {name: value for name in fields if (value := options.pop(name)) is not None}
        try:
            arguments = {"request": request(**values)} if request else {}
        except ValidationError as error:
            name, reason = refusal(error)
            raise typer.BadParameter(reason, param_hint=f"'{lines[name].name}'") from None
        with without_exits("This command"):
            function(**arguments, **options)

    parameters: list[Parameter] = []
    for each in signature(function).parameters.values():
        own = each.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[each.name])
        parameters += fields.values() if each.name == "request" else [own]
    called.__signature__ = signature(called).replace(parameters=parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {each.name: each.annotation for each in parameters}
    return called


def _parameter(name: str, field: FieldInfo, line: CommandLine) -> Parameter:
    limits = {side: getattr(each, key) for each in field.metadata for side, key in _LIMITS if hasattr(each, key)}
    settings: dict[str, Any] = {"help": " ".join((field.description or "").split()), "metavar": line.metavar, **limits}
    option = str(line.name)
    info = typer.Option(option, **settings) if option.startswith("-") else typer.Argument(**settings)
    default = Parameter.empty if field.is_required() else line.default
    # Typer reads a type, which may be absent; pydantic reads the text of a union of types, and of listed choices.
    union = get_origin(field.annotation) in (Union, UnionType) and NoneType not in get_args(field.annotation)
    choices = get_origin(field.annotation) is list and get_origin(get_args(field.annotation)[0]) is Literal
    kind: Any = str if union else list[str] if choices else field.annotation
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info])
