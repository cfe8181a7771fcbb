"""Renders the commands with their arguments and options from the command line itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command

from flowmill.flows.cli import app


def render() -> str:
    """Return a section for each command."""
    return "\n".join(line for name, command in commands().items() for line in _section(name, command))


def commands() -> dict[str, Any]:
    """Return every command by its words: 'flowmill store ls' and so on."""
    by_name: dict[str, Any] = {}
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        loaded = getattr(command, "loaded", command)
        inner = getattr(loaded, "commands", None) or {"": loaded}
        by_name |= {f"flowmill {name} {sub}".rstrip(): each for sub, each in inner.items()}
    return by_name


def _section(name: str, command: Any) -> Iterator[str]:
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option" and each.name != "help"]
    words = " ".join([name, *(each.metavar for each in arguments)])
    yield from [f"## {name}", "", f"`{words}`", "", _text(command.help), ""]
    yield from ["| argument or option | default | |", "|---|---|---|"]
    yield from (f"| `{each.metavar}` | | {_text(each.help)} |" for each in arguments)
    yield from (f"| {_names(each)} | {_default(each.default)} | {_text(each.help)} |" for each in options)
    yield ""


def _names(option: Any) -> str:
    value = "" if option.is_flag else f" {option.metavar or max(option.opts, key=len).strip('-').upper()}"
    return ", ".join(f"`{name}{value}`" for name in sorted(option.opts, key=len, reverse=True))


def _default(value: Any) -> str:
    return "" if value is None or value is False or value == "" or callable(value) else f"`{_plain(value)}`"


def _plain(value: Any) -> str:
    return str(value) if isinstance(value, str | int | float | Path) else ", ".join(map(str, value))


def _text(text: str | None) -> str:
    return re.sub(r"\s+", " ", text or "").replace("|", "\\|").strip()
