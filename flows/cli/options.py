"""Arguments and options: those that several commands share, and those of the fields of a request."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

from configs.errors import ConfigError

Config = Annotated[Path, typer.Argument(help="Config file; presets are in configs/.", metavar="CONFIG")]
Root = Annotated[str | None, typer.Option("--root", help="Folder of the artifact store.", metavar="URI")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="Override a setting: section.key=value.", metavar="KEY=VALUE")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
Long = Annotated[bool, typer.Option("--long", help="List everything: all epochs and columns, and names in full.")]
Stages = Annotated[list[str] | None, typer.Option("--stage", help="Only this stage.", metavar="STAGE")]
Epochs = Annotated[list[int] | None, typer.Option("--epoch", help="Only this epoch.", metavar="N")]
Pool = Annotated[str, typer.Option("--pool", help="Work pool.", metavar="NAME")]
Kinds = Literal["process", "docker", "kubernetes"]
Kind = Annotated[Kinds, typer.Option("--type", help="Type of the pool, if it is created.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print the result only.")]
TrustStore = Annotated[
    bool, typer.Option("--trust-store", help="Run code and commands that only the store's record names.")
]
#: Types that Typer parses itself; the fields of other types are parsed by pydantic.
_PLAIN = (str, int, float, bool, str | None, int | None, float | None, list[str])


def with_options(function: Callable[..., None]) -> Callable[..., None]:
    """Return the function of a command with an option for every field of its ``request``, if it takes one.

    Name, type, default, limits and help of an option are those of the field, see ``flows.requests.CommandLine``.

    Args:
        function: its parameters are options, but for ``request``, a ``flows.requests.Request``.
    """
    hints = get_type_hints(function, include_extras=True)
    if "request" not in hints:
        return function
    request = hints["request"]
    fields = _parameters(request)

    def called(**given: Any) -> None:
        """Call the function with the request; options that are not given have the defaults of its fields."""
        values = {name: value for name in fields if (value := given.pop(name)) is not None}
        function(request=_checked(request, values), **given)

    parameters: list[Parameter] = []
    for each in signature(function).parameters.values():
        own = each.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[each.name])
        parameters += fields.values() if each.name == "request" else [own]
    called.__signature__ = signature(called).replace(parameters=parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {each.name: each.annotation for each in parameters}
    return called


def _parameters(request: Any) -> dict[str, Parameter]:
    """Return a parameter for Typer for each field of a request that the command line has."""
    from flows.requests import command_line

    found = {}
    for name, field in request.model_fields.items():
        line = command_line(name, field)
        if line.hidden:
            continue
        plain = field.annotation in _PLAIN
        limits = {side: getattr(each, key) for each in field.metadata for side, key in _LIMITS if hasattr(each, key)}
        settings: dict[str, Any] = {"help": " ".join((field.description or "").split()), "metavar": line.shown}
        settings |= limits if plain else {"parser": _parser(field)}
        info = typer.Option(line.name, **settings) if line.is_option else typer.Argument(**settings)
        found[name] = Parameter(
            name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if field.is_required() else line.default,
            annotation=Annotated[field.annotation if plain else Any, info],
        )
    return found


_LIMITS = (("min", "ge"), ("max", "le"))


def _parser(field: Any) -> Callable[[Any], Any]:
    """Return a function that reads a field's value from text, with a usage error if it cannot."""
    from pydantic import TypeAdapter, ValidationError

    def parsed(text: Any) -> Any:
        try:
            return TypeAdapter(Annotated[field.annotation, *field.metadata]).validate_python(text)
        except ValidationError as error:
            raise typer.BadParameter(_reason(error.errors()[0])) from None

    return parsed


def _checked(request: Any, values: dict[str, Any]) -> Any:
    """Return the request of given values; refuse values that it refuses with a ConfigError."""
    from pydantic import ValidationError

    from flows.requests import command_line

    try:
        return request(**values)
    except ValidationError as error:
        item = error.errors()[0]
        name = str(item["loc"][0])
        raise ConfigError(f"{command_line(name, request.model_fields[name]).name}: {_reason(item)}") from None


def _reason(item: Any) -> str:
    return str(item["msg"]).removeprefix("Value error, ")
