"""Modules of users: from their folders, found after all installed ones, and from sources that a config carries."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from pathlib import Path
from types import CodeType, MappingProxyType
from typing import Any

#: The folder that holds the package flowmill; other processes import it from there.
HOME = next(up for up in Path(__file__).parents if (up / "flowmill" / "__init__.py").is_file())


class _Sources(MetaPathFinder, InspectLoader):
    """Finds and loads modules by their source. Tracebacks show its lines."""

    def __init__(self) -> None:
        self.by_name: dict[str, str] = {}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return spec_from_loader(name, self) if name in self.by_name else None

    def get_source(self, name: str) -> str:
        return self.by_name[name]

    def get_code(self, name: str) -> CodeType:
        code: CodeType = compile(self.by_name[name], f"{name}.py", "exec", dont_inherit=True)
        return code


_sources = _Sources()


def import_from(folders: Iterable[str], sources: Mapping[str, str] = MappingProxyType({})) -> None:
    """Make a user's modules importable: append folders to ``sys.path``, and add modules by name and source."""
    sys.path += [folder for folder in dict.fromkeys(folders) if folder not in sys.path]
    for name, source in sources.items():
        # Sources of one name do the same work, but may have other types of options.
        if _sources.by_name.get(name, source) != source:
            sys.modules.pop(name, None)
    _sources.by_name |= sources
    if sources and _sources not in sys.meta_path:
        sys.meta_path.append(_sources)


def user_folder_last() -> None:
    """Append the working directory to ``sys.path``, so that a user's rewards and models are found last."""
    folder = str(Path.cwd())
    # 'python -m' puts the working directory first; one that PYTHONPATH names stays where the user put it.
    if not sys.flags.safe_path and sys.path[:1] in ([""], [folder]):
        del sys.path[0]
    import_from([folder])
