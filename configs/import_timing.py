"""Measures the time of imports, so that it is not counted as work when a library is first used during the work.

A finder in front of all others delegates each module to the finder that knows it, and times its execution.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import threading
import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any


class _Clock(threading.local):
    """The time a thread has spent on imports so far."""

    depth = 0
    seconds = 0.0


_CLOCK = _Clock()


class _Measured(importlib.abc.Loader):
    """A loader that times the execution of a module by its real loader, invisibly to the module."""

    def __init__(self, loader: Any, spec: importlib.machinery.ModuleSpec) -> None:
        self._loader, self._spec = loader, spec

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        found: ModuleType | None = self._loader.create_module(spec)
        return found

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module with its real loader restored; only the outermost import is timed."""
        self._spec.loader = self._loader
        if getattr(module, "__loader__", None) is self:
            module.__loader__ = self._loader
        begun = time.monotonic()
        _CLOCK.depth += 1
        try:
            self._loader.exec_module(module)
        finally:
            _CLOCK.depth -= 1
            if not _CLOCK.depth:
                _CLOCK.seconds += time.monotonic() - begun


class _Finder(importlib.abc.MetaPathFinder):
    """A finder that times every module found by later finders."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                # Modules without a loader, or with an old one, are skipped.
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _Measured(spec.loader, spec)
                return spec
        return None


_FINDER = _Finder()


def measure_imports() -> None:
    """Start to measure imports."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


def seconds_of_imports() -> float:
    """Return the seconds this thread has spent on measured imports."""
    return _CLOCK.seconds
