"""Files and folders that options of components name (``flowmill.configs.path_types``), and the hashes of their content.

The annotations are read from the source text of components, so no heavy module is imported, and a new annotated option
needs no entry here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from flowmill.configs import introspection
from flowmill.configs.base import Component
from flowmill.configs.components import components
from flowmill.configs.fingerprint import fingerprint
from flowmill.configs.folders import changed_ns, files_below
from flowmill.configs.path_types import looks_local
from flowmill.configs.rewards import RewardSection
from flowmill.configs.schema import RunConfig
from flowmill.models.rewards import ARGUMENTS, REWARDS
from flowmill.storage.backends.file_hash_cache import file_hashes
from flowmill.tasks.algorithms import algorithms_of
from flowmill.tasks.inputs.policy_kind import kind_name
from flowmill.tasks.inputs.weight_sources import model_files

#: Default prompt column that names the files of a ``ColumnFolderPlace``.
_COLUMN = "image"

#: The types of ``flowmill.configs.path_types`` that name a path or a fit; ``FolderPlace`` also matches
#: ``ColumnFolderPlace``.
_KINDS = ("FilePlace", "FolderPlace", "ModelPlace", "FitPlace")

#: Metadata of all prompts, one mapping each.
Metadata = Iterable[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionPath:
    """A path or hub id that an option of a component names."""

    component: Component
    label: str
    """Role of the component, such as ``reward``."""
    option: str
    """The option; for a reward inside another, prefixed with the other's option."""
    path: str
    """Its value: a path, or a hub model id."""
    kind: str
    """Its annotation in the component's source text, which contains a name of ``flowmill.configs.path_types``."""

    @property
    def is_file(self) -> bool:
        """Whether the option names a file rather than a folder."""
        return "FilePlace" in self.kind

    @property
    def is_fit(self) -> bool:
        """Whether the option names a fit of the store, see ``flowmill.tasks.inputs.fits``."""
        return "FitPlace" in self.kind

    @property
    def may_be_hub(self) -> bool:
        """Whether the value can be a hub model id if there is no folder of that name."""
        # Names of old hub repositories have no owner.
        return "ModelPlace" in self.kind and not (looks_local(self.path) and "/" in self.path)

    @property
    def column(self) -> str | None:
        """The prompt column that names files of the folder; None for other kinds."""
        named = self.component.options.get("column", _COLUMN)
        return str(named) if "ColumnFolderPlace" in self.kind else None

    def __str__(self) -> str:
        kind = "fit" if self.is_fit else "file at" if self.is_file else "folder at"
        return f"{self.label} '{self.component.name}': the {kind} '{self.path}' (option '{self.option}')"


@dataclass(frozen=True, slots=True)
class PathContent:
    """Content of a place."""

    digest: str
    """Checksum of a file; for a folder, a hash of the checksums of its files."""
    changed_ns: int
    """Time of the last change, in nanoseconds since 1970."""


def places(component: Component, table: Mapping[str, str], *, label: str) -> Iterator[OptionPath]:
    """Yield the places that the options of a component name.

    Args:
        table: its table of import strings, by name.
        label: its role, for messages.
    """
    for option, path, kind in _named(component.name, component.options, table, ""):
        yield OptionPath(component=component, label=label, option=option, path=path, kind=kind)


def taken(name: str, table: Mapping[str, str]) -> dict[str, str] | None:
    """Return the options of a component with their annotations; None if its source text does not show them."""
    return _taken(table.get(name, name), len(ARGUMENTS) if table is REWARDS else 0)


@cache
def _taken(import_string: str, arguments: int) -> dict[str, str] | None:
    return introspection.options(import_string, skipped=arguments)


def _named(
    name: str, options: Mapping[str, Any], table: Mapping[str, str], above: str
) -> Iterator[tuple[str, str, str]]:
    kinds = (taken(name, table) if options else None) or {}
    for option, value in options.items():
        kind = kinds.get(option, "")
        if "RewardOptions" in kind and isinstance(value, Mapping):
            yield from _named(str(options.get("reward")), value, REWARDS, f"{above}{option}.")
        elif any(each in kind for each in _KINDS):
            yield from ((f"{above}{option}", path, kind) for path in _leaves(value))


def _leaves(value: object) -> Iterator[str]:
    """Yield the strings of an option, including those in lists and mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (leaf for each in value.values() for leaf in _leaves(each))
    elif isinstance(value, list | tuple):
        yield from (leaf for each in value for leaf in _leaves(each))


def reward_places(section: RewardSection) -> tuple[OptionPath, ...]:
    """Return the places that a reward, monitor or judge reads."""
    return tuple(places(section, REWARDS, label="reward"))


def algorithm_places(config: RunConfig) -> tuple[OptionPath, ...]:
    """Return the places that the algorithm reads, such as its teachers."""
    return tuple(places(config.optimize.algorithm, algorithms_of(kind_name(config)), label="algorithm"))


def config_places(config: RunConfig) -> dict[str, tuple[OptionPath, ...]]:
    """Return the places that rewards and the algorithm read, by setting; components that read none are left out."""
    paths = {"optimize.algorithm": algorithm_places(config)}
    for setting, component in components(config):
        if isinstance(component, RewardSection):
            paths[setting] = reward_places(component)
    return {setting: each for setting, each in paths.items() if each}


def content_of(place: OptionPath, metadata: Callable[[], Metadata], *, deep: bool = False) -> PathContent | None:
    """Return the content of a place; None if it does not exist, cannot be read, or is a fit of a store.

    Args:
        metadata: returns the metadata of all prompts; called for places with a column only.
        deep: read all files again, see ``flowmill.storage.backends.file_hash_cache``.
    """
    try:
        folder, names = _files(place, metadata)
        if not names:
            return None
        hashes = file_hashes(folder, names, deep=deep)
        changed = max(changed_ns(folder, name) for name in names)
    except OSError:
        return None
    return PathContent(hashes[names[0]] if place.is_file else fingerprint(hashes), changed)


def changed_places(config: RunConfig, metadata: Callable[[], Metadata]) -> list[str] | None:
    """Read all places again; return the paths that changed undetected, None if no place is local."""
    named = {place.path: place for places in config_places(config).values() for place in places}
    believed = {path: content for path, place in named.items() if (content := content_of(place, metadata)) is not None}
    return (
        [path for path in believed if content_of(named[path], metadata, deep=True) != believed[path]]
        if believed
        else None
    )


def _files(place: OptionPath, metadata: Callable[[], Metadata]) -> tuple[Path, list[str]]:
    """Return the relevant files of a place as a folder and paths below it; no paths if it does not exist."""
    path = Path(place.path)
    if place.is_file:
        return path.parent, [path.name] if path.is_file() else []
    if place.is_fit or not path.is_dir():
        return path, []
    if place.column is not None:
        named = {row.get(place.column) for row in metadata()}
        return path, sorted(name for name in named if isinstance(name, str) and (path / name).is_file())
    if "ModelPlace" in place.kind:
        return path, model_files(path)
    return path, [name for name in files_below(path) if not any(part.startswith(".") for part in name.split("/"))]
