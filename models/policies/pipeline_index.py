"""The index of a diffusers repository: its components, as classic or modular pipelines write it.

A modular index says of each component from where it is to be loaded, which may be another repository, and the import
of its class. Neither is followed: components are those in folders of their names next to the index, as classic ones
are. Reads files without torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from models.library_loading import read_json

CLASSIC = "model_index.json"
MODULAR = "modular_model_index.json"
INDICES = (CLASSIC, MODULAR)
#: ``owner/name``; anything else that a component may be loaded from is a path on another machine.
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
_PLACE = "pretrained_model_name_or_path"


def index_file(folder: Path) -> Path:
    """Return a folder's index, the classic one where it has both or none."""
    return next((path for path in (folder / name for name in INDICES) if path.is_file()), folder / CLASSIC)


def in_folder(folder: Path) -> Callable[[str], bool]:
    """Return whether a component of a name is in a folder; other values are no names."""
    return lambda name: name.isidentifier() and (folder / name).is_dir()


def read_index_file(path: Path) -> dict[str, Any]:
    """Return an index as ``plain_index`` gives it.

    Raises:
        OSError: there is no such file.
        ValueError: it is no JSON object, or says of a component something else than its library and class.
    """
    return plain_index(read_json(path), in_folder(path.parent))


def plain_index(index: Mapping[str, Any], has: Callable[[str], bool]) -> dict[str, Any]:
    """Return an index as classic ones are: of a component its library and class, both null where there is none.

    Args:
        index: as its file has it.
        has: whether a repository has a folder of this name, which counts for modular ones.

    Raises:
        ValueError: it says of a component something else than its library and class.
    """
    return {
        name: (_class_of(name, entry) if has(name) else [None, None]) if _is_modular(entry) else entry
        for name, entry in index.items()
    }


def portable_index(index: Mapping[str, Any], has: Callable[[str], bool]) -> dict[str, Any]:
    """Return an index of the same form that holds wherever its folder moves: only of components next to it.

    Of a modular one components of repositories of the Hub stay, as it names them.

    Args:
        index: as its file has it.
        has: whether there is a folder of a component.
    """
    found: dict[str, Any] = {}
    for name, entry in index.items():
        if not isinstance(entry, list) or (has(name) and not _is_modular(entry)):
            found[name] = entry
        elif not _is_modular(entry):
            found[name] = [None, None]
        elif has(name):
            found[name] = component_entry(MODULAR, name, *_class_of(name, entry))
        elif _REPOSITORY.fullmatch(str(entry[2].get(_PLACE))):
            found[name] = entry
    return found


def component_entry(index: str, name: str, library: str, class_name: str) -> list[Any]:
    """Return an index entry of a component in the folder of its name.

    Args:
        index: name of the index's file.
        name: of the component.
        library: that its class is of.
        class_name: its class.
    """
    if index == CLASSIC:
        return [library, class_name]
    # For a local folder diffusers loads the files there, whatever location the index names.
    about = {"type_hint": [library, class_name], "subfolder": name, _PLACE: None, "variant": None, "revision": None}
    return [library, class_name, about]


def placed_index(index: Mapping[str, Any], repository: str) -> dict[str, Any]:
    """Return an index whose components are those of a Hub repository without local files."""
    return {
        name: [*entry[:2], {**entry[2], _PLACE: entry[2].get(_PLACE) or repository}] if _is_modular(entry) else entry
        for name, entry in index.items()
    }


def _is_modular(entry: Any) -> bool:
    return isinstance(entry, list) and len(entry) == 3 and isinstance(entry[2], Mapping)


def _class_of(name: str, entry: list[Any]) -> list[Any]:
    """Return library and class of a component, which a modular index may have only where it says how to load it."""
    found = entry[:2] if entry[0] is not None else entry[2].get("type_hint")
    if not isinstance(found, list) or len(found) != 2 or not all(isinstance(each, str) for each in found):
        raise ValueError(f"{MODULAR} says of '{name}' {found!r}, not its library and class")
    return found
