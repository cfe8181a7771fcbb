"""Imports that wait: a package that takes seconds is imported when something of it is used, not where it is named.

``importlib.util.LazyLoader`` does not defer enough: every ``import`` of its module executes it (Python 3.11).
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

_LOCK = threading.RLock()


class _Deferred(ModuleType):
    """Stands for a package until something of it is asked for, and then passes everything on."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        # Python reads it to decide whether this is a package; ``_Parts`` finds its submodules.
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        return getattr(_imported(self.__name__), name)


class _Parts(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds submodules of a deferred package once the package is imported, which may have imported them as well."""

    def __init__(self, stand_in: _Deferred) -> None:
        self._package, self._path = stand_in.__name__, stand_in.__path__
        self._specs: dict[str, importlib.machinery.ModuleSpec | None] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(f"{self._package}.") or path is not self._path:
            return None
        package = _imported(self._package)
        module = sys.modules.get(fullname)
        if module is None:
            return importlib.machinery.PathFinder.find_spec(fullname, package.__path__)
        # Of a module that came with its package the import system asks the spec, and would carry it out once more.
        self._specs[fullname] = module.__spec__
        module.__spec__ = importlib.machinery.ModuleSpec(fullname, self)
        return module.__spec__

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Carry nothing out: it was, with its package."""
        module.__spec__ = self._specs.pop(module.__name__)


@contextmanager
def deferred(package: str) -> Iterator[None]:
    """Have a package imported where it is used first, inside; nothing if it is imported already.

    Others see no such package imported, after that, unless it was used.
    """
    spec = None if package in sys.modules else importlib.util.find_spec(package)
    if spec is None:
        yield
        return
    stand_in = _Deferred(package)
    parts = _Parts(stand_in)
    stand_in.__file__ = spec.origin
    sys.modules[package] = stand_in
    sys.meta_path.insert(0, parts)
    try:
        yield
    finally:
        sys.meta_path.remove(parts)
        # It is gone too where its import failed.
        if sys.modules.get(package) is stand_in:
            del sys.modules[package]


def _imported(package: str) -> ModuleType:
    """Return a package, imported now if it has not been."""
    with _LOCK:
        if isinstance(sys.modules.get(package), _Deferred):
            del sys.modules[package]
        return importlib.import_module(package)
