"""Run locks: only one process at a time works on a run, and commands take the lock before heavy imports."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from flowmill.configs.errors import ConfigError
from flowmill.configs.schema import RunConfig
from flowmill.storage import layout
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.artifacts.lineage import RunFolder

if TYPE_CHECKING:
    # It imports torch, and a refused command should not wait for that.
    from flowmill.tasks.runs.context import RunContext

#: Most bytes of a name: file systems allow 255, and other names contain this one.
_LONGEST_NAME = 128
#: Prefix of the series of records that mark a config as finished.
FINISHED = "finished-"
_Key = tuple[str, str]
#: Run locks of this process before execution, by root and name.
_locks: dict[_Key, ExitStack] = {}
#: Run locks that stages of this process share, and the number of these stages.
_shared: dict[_Key, tuple[ExitStack, int]] = {}
_guard = threading.RLock()


def run_name(config: RunConfig) -> str:
    """Return the run's name."""
    name = config.run.name or ""
    if not name or not all(char.isalnum() or char in "-_." for char in name) or name.startswith("."):
        raise ConfigError(f"run.name '{name}' must consist of letters, digits, '-', '_' and '.'. Set it with --name.")
    if len(name.encode()) > _LONGEST_NAME:
        raise ConfigError(
            f"run.name '{name[:20]}...' has {len(name.encode())} bytes; folders are named after it, so it must have at "
            f"most {_LONGEST_NAME}. Set a shorter one with --name."
        )
    return name


@contextmanager
def holding(store: ArtifactStore, name: str) -> Iterator[None]:
    """Hold a run's lock until ``executing`` or ``executing_stage`` takes it over inside.

    So another command is refused before its heavy imports, even while this process is still importing.
    """
    run = RunFolder(store, name)
    key = (store.root.uri, run.name)
    with ExitStack() as lock:
        with _guard:
            is_first = key not in _locks and key not in _shared
            if is_first:
                lock.enter_context(run.at_work())
                _locks[key] = lock
        try:
            yield
        finally:
            with _guard:
                if _locks.get(key) is lock:
                    del _locks[key]


def was_finished(run: RunFolder) -> bool:
    """Return whether a run was ever finished, under any config."""
    return any(name.startswith(FINISHED) for name in run.store.root.list(layout.run(run.name)))


@contextmanager
def executing(context: RunContext) -> Iterator[None]:
    """Hold the run's lock, after clearing unfinished writes of killed processes of this machine."""
    context.store.root.sweep()
    with _taken_over(context):
        yield


@contextmanager
def executing_stage(context: RunContext) -> Iterator[None]:
    """Hold the run's lock for a stage that is started on its own; concurrent ones of this process share it."""
    key = (context.store.root.uri, context.run.name)
    with _guard:
        lock, count = _shared.get(key) or (_taken_over(context), 0)
        _shared[key] = lock, count + 1
    try:
        yield
    finally:
        with _guard:
            lock, count = _shared.pop(key)
            if count > 1:
                _shared[key] = lock, count - 1
            else:
                lock.close()


def _taken_over(context: RunContext) -> ExitStack:
    """Return a run's lock, taken from ``holding`` if this process holds it there."""
    root, lock = context.store.root, ExitStack()
    if (claim := _locks.pop((root.uri, context.run.name), None)) is not None:
        # Commits check the lease of their own root.
        claim.close()
    lock.enter_context(context.run.at_work())
    return lock


def refuse_while_executing(store: ArtifactStore, name: str) -> None:
    """Check that no other process executes a run, as a separately started stage would race with it."""
    run = RunFolder(store, name)
    if (key := (store.root.uri, run.name)) not in _locks and key not in _shared:
        with run.at_work():
            pass
