"""Settings that hold a path on this machine, or a hub id if no such path exists."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from flowmill.configs.user_directories import user_path

#: All such settings except the options of components (``flowmill.configs.path_types``); * matches any list index.
PATH_SETTINGS = (
    "data.train",
    "data.heldout",
    "data.prior.train",
    "prompts.train",
    "prompts.heldout",
    "prompts.sources.*.train",
    "prompts.sources.*.heldout",
    "model.path",
    "model.single_file",
    "model.start_config",
    "model.lora.start",
    "critic.path",
    "render.model.path",
    "render.model.single_file",
)
_IMPORT = re.compile(r"[A-Za-z_]\w*(\.\w+)*:[A-Za-z_]\w*")
#: The beginning of a place on a machine: an absolute path, or the address of a file.
_PLACE = re.compile(r"(file:|sqlite:)|~?[/\\]|[A-Za-z]:[/\\]")

#: Several files, by a list, a range or a pattern; or a tar.
_PARTS = re.compile(r"::|[*?\[{]|\.tar(\.\w+)?$")


def resolve_paths(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Make paths that exist below a folder absolute, in place, so that a run can be resumed from anywhere."""
    for setting in PATH_SETTINGS:
        _resolve(data, setting.split("."), folder)
    return data


def note_modules(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the data with a folder added to ``execution.modules`` if it holds a module that an import string names."""
    execution = data.get("execution") or {}
    listed = execution.get("modules", []) if isinstance(execution, dict) else None
    if not isinstance(listed, list | tuple):
        return data
    names = {text.split(":")[0].split(".")[0] for text in _texts(data) if _IMPORT.fullmatch(text)}
    own = any(name != "flowmill" and ((folder / f"{name}.py").is_file() or (folder / name).is_dir()) for name in names)
    absolute = [_absolute(each, folder) for each in listed]
    modules = list(dict.fromkeys([*absolute, *([str(folder.resolve())] if own else [])]))
    return data | ({"execution": {**execution, "modules": modules}} if modules else {})


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)


def _resolve(section: object, parts: Sequence[str], folder: Path) -> None:
    name, *rest = parts
    if name == "*":
        # Overrides name an entry by its index.
        for each in section.values() if isinstance(section, dict) else section if isinstance(section, list) else ():
            _resolve(each, rest, folder)
    elif isinstance(section, dict) and rest:
        _resolve(section.get(name), rest, folder)
    elif isinstance(section, dict) and name in section:
        section[name] = _absolute(section[name], folder)


def _absolute(value: object, folder: Path) -> object:
    if isinstance(value, dict):
        return {name: _absolute(each, folder) for name, each in value.items()}
    if isinstance(value, str) and _PARTS.search(value) and not (folder / user_path(value)).exists():
        # Places, not files.
        return "::".join(_below(each, folder) for each in value.split("::"))
    if isinstance(value, str) and "://" not in value and (folder / user_path(value)).exists():
        return str((folder / user_path(value)).resolve())
    return value


def _below(tar: str, folder: Path) -> str:
    path = user_path(tar)
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
