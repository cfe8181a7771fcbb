"""Lazy imports: a slow package is imported on first use of an attribute, not by the import statement.

``importlib.util.LazyLoader`` does not suffice: every ``import`` of its module executes it (Python 3.11).
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
    """A stand-in for a package that imports it on first attribute access and delegates to it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        # Marks the stand-in as a package; ``_Parts`` finds its submodules.
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        return getattr(_imported(self.__name__), name)


class _Parts(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds submodules of a deferred package after importing the package, which may already have imported them."""

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
        # The import system would execute a module again that was imported with its package: replace its spec.
        self._specs[fullname] = module.__spec__
        module.__spec__ = importlib.machinery.ModuleSpec(fullname, self)
        return module.__spec__

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Restore the spec; the module was already executed with its package."""
        module.__spec__ = self._specs.pop(module.__name__)


@contextmanager
def deferred(package: str) -> Iterator[None]:
    """Defer the import of a package to its first use inside the block, unless it is already imported.

    After the block, ``sys.modules`` contains the package only if it was used.
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
        # A failed import has removed the stand-in already.
        if sys.modules.get(package) is stand_in:
            del sys.modules[package]


def _imported(package: str) -> ModuleType:
    """Return a package, importing it if necessary."""
    with _LOCK:
        if isinstance(sys.modules.get(package), _Deferred):
            del sys.modules[package]
        return importlib.import_module(package)
