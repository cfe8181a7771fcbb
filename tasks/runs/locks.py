"""Run locks: only one process at a time executes a run, and commands take the lock before heavy imports."""

from __future__ import annotations

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
#: Run locks of this process before execution, by root and name.
_locks: dict[tuple[str, str], ExitStack] = {}


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
    """Hold a run's lock until ``executing`` takes it over inside.

    So another command is refused before its heavy imports, even while this process is still importing.
    """
    run = RunFolder(store, name)
    key = (store.root.uri, run.name)
    if key in _locks:
        yield
        return
    with ExitStack() as lock:
        lock.enter_context(store.root.lock(run.lock_path, f"Run '{run.name}'"))
        _locks[key] = lock
        try:
            yield
        finally:
            _locks.pop(key, None)


def was_finished(run: RunFolder) -> bool:
    """Return whether a run was ever finished, under any config."""
    return any(name.startswith(FINISHED) for name in run.store.root.list(layout.run(run.name)))


@contextmanager
def executing(context: RunContext) -> Iterator[None]:
    """Hold the run's lock, after clearing unfinished writes of killed processes of this machine."""
    root = context.store.root
    root.sweep()
    if (lock := _locks.pop((root.uri, context.run.name), None)) is not None:
        # Commits check the lease of their own root.
        lock.close()
    with root.lock(context.run.lock_path, f"Run '{context.run.name}'"):
        yield


def refuse_while_executing(store: ArtifactStore, name: str) -> None:
    """Check that no other process executes a run, as a separately started stage would race with it."""
    run = RunFolder(store, name)
    if (store.root.uri, run.name) not in _locks:
        with store.root.lock(run.lock_path, f"Run '{run.name}'"):
            pass
