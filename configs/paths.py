"""Settings that hold a path on this machine, or a hub id if no such path exists."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: All such settings except the options of components (``configs.path_types``); * matches any list index.
PATH_SETTINGS = (
    "data.train",
    "data.heldout",
    "prompts.train",
    "prompts.heldout",
    "prompts.sources.*.train",
    "prompts.sources.*.heldout",
    "model.path",
    "model.single_file",
    "model.checkpoint",
    "model.start_config",
    "model.lora.start",
    "critic.path",
    "render.model.path",
    "render.model.single_file",
)
#: The beginning of a place on a machine: an absolute path, or the address of a file.
_PLACE = re.compile(r"(file:|sqlite:)|~?[/\\]|[A-Za-z]:[/\\]")


def resolve_paths(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Make paths that exist below a folder absolute, in place, so that a run can be resumed from anywhere."""
    for setting in PATH_SETTINGS:
        _resolve(data, setting.split("."), folder)
    return data


def _resolve(section: object, parts: Sequence[str], folder: Path) -> None:
    name, *rest = parts
    if name == "*":
        for each in section if isinstance(section, list) else ():
            _resolve(each, rest, folder)
    elif isinstance(section, dict) and rest:
        _resolve(section.get(name), rest, folder)
    elif isinstance(section, dict) and name in section:
        section[name] = _absolute(section[name], folder)


def _absolute(value: object, folder: Path) -> object:
    if isinstance(value, dict):
        return {name: _absolute(each, folder) for name, each in value.items()}
    if isinstance(value, str) and value.endswith(".tar"):
        # Several tars, with ranges and patterns: places, not files.
        return "::".join(_below(each, folder) for each in value.split("::"))
    if isinstance(value, str) and "://" not in value and (folder / Path(value).expanduser()).exists():
        return str((folder / Path(value).expanduser()).resolve())
    return value


def _below(tar: str, folder: Path) -> str:
    path = Path(tar).expanduser()
    return str(folder.resolve() / path) if "://" not in tar and (folder / path).parent.is_dir() else tar


def portable(value: Any) -> Any:
    """Return settings or metadata with only the last name of every absolute path, for people without that machine."""
    if isinstance(value, dict):
        return {key: portable(each) for key, each in value.items()}
    if isinstance(value, list):
        return [portable(each) for each in value]
    if isinstance(value, str) and _PLACE.match(value):
        return "…/" + re.split(r"[/\\]", value.rstrip("/\\"))[-1]
    return value
