"""The index of a diffusers repository: its components, in the format of classic or modular pipelines.

A modular index names for each component a source, which may be another repository, and the import of its class. Both
are ignored: as in classic pipelines, components are the folders of their names next to the index. This module does not
import torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flowmill.models.library_loading import read_json

CLASSIC = "model_index.json"
MODULAR = "modular_model_index.json"
INDICES = (CLASSIC, MODULAR)
#: ``owner/name``; any other source of a component is a path on another machine.
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
_PLACE = "pretrained_model_name_or_path"


def index_file(folder: Path) -> Path:
    """Return the path of a folder's index: the classic one if it has both or neither."""
    return next((path for path in (folder / name for name in INDICES) if path.is_file()), folder / CLASSIC)


def in_folder(folder: Path) -> Callable[[str], bool]:
    """Return a function that tests whether a folder has a component of some name."""
    return lambda name: name.isidentifier() and (folder / name).is_dir()


def read_index_file(path: Path) -> dict[str, Any]:
    """Read an index file and return its ``plain_index``. Raises OSError if there is no such file; ValueError if it is
    not a JSON object, or a component's entry is not its library and class."""
    return plain_index(read_json(path), in_folder(path.parent))


def plain_index(index: Mapping[str, Any], has: Callable[[str], bool]) -> dict[str, Any]:
    """Return an index in the classic format: each component's library and class, both null if it is missing. Raises
    ValueError if a component's entry is not its library and class. ``has``: whether a repository has a folder of this
    name; used for modular indexes."""
    return {
        name: (_class_of(name, entry) if has(name) else [None, None]) if _is_modular(entry) else entry
        for name, entry in index.items()
    }


def portable_index(index: Mapping[str, Any], has: Callable[[str], bool]) -> dict[str, Any]:
    """Return an index in the same format that stays valid when its folder moves: only components next to it. A modular
    index keeps its components from Hub repositories."""
    entries: dict[str, Any] = {}
    for name, entry in index.items():
        if not isinstance(entry, list) or (has(name) and not _is_modular(entry)):
            entries[name] = entry
        elif not _is_modular(entry):
            entries[name] = [None, None]
        elif has(name):
            entries[name] = component_entry(MODULAR, name, *_class_of(name, entry))
        elif _REPOSITORY.fullmatch(str(entry[2].get(_PLACE))):
            entries[name] = entry
    return entries


def component_entry(index: str, name: str, library: str, class_name: str) -> list[Any]:
    """Return an index entry of a component in the folder of its name."""
    if index == CLASSIC:
        return [library, class_name]
    # For a local folder, diffusers loads the files there even if the index names another location.
    fields = {"type_hint": [library, class_name], "subfolder": name, _PLACE: None, "variant": None, "revision": None}
    return [library, class_name, fields]


def placed_index(index: Mapping[str, Any], repository: str) -> dict[str, Any]:
    """Return an index whose components without a source come from a Hub repository."""
    return {
        name: [*entry[:2], {**entry[2], _PLACE: entry[2].get(_PLACE) or repository}] if _is_modular(entry) else entry
        for name, entry in index.items()
    }


def _is_modular(entry: Any) -> bool:
    return isinstance(entry, list) and len(entry) == 3 and isinstance(entry[2], Mapping)


def _class_of(name: str, entry: list[Any]) -> list[Any]:
    """Return a component's library and class; a modular index may have them only in its loading settings."""
    kind = entry[:2] if entry[0] is not None else entry[2].get("type_hint")
    if not isinstance(kind, list) or len(kind) != 2 or not all(isinstance(each, str) for each in kind):
        raise ValueError(f"{MODULAR} says of '{name}' {kind!r}, not its library and class")
    return kind
