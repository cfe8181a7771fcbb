"""One process at a time executes a run: its lock, and commands that hold it from their first moments on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from configs.errors import ConfigError
from configs.schema import RunConfig
from storage import layout
from storage.commit import ArtifactStore
from storage.lineage import RunFolder

if TYPE_CHECKING:
    # It takes torch, and who is refused should not wait for that.
    from tasks.runs.context import RunContext

#: Bytes of a name: file systems take 255, and other names are made of it.
_LONGEST_NAME = 128
#: What the names of series of records begin with that say a config is finished.
FINISHED = "finished-"
#: Locks of runs that this process holds before it executes them, by root and name.
_held: dict[tuple[str, str], ExitStack] = {}


def run_name(config: RunConfig) -> str:
    """Return the run's name.

    Raises:
        ConfigError: it is missing or cannot be a folder name.
    """
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
    """Hold a run's lock until what executes the run inside takes it over.

    So another command is refused before it imports anything heavy, also while this one does so itself.

    Raises:
        RunConflictError: another process executes the run.
        StoreError: the root cannot be written.
    """
    run = RunFolder(store, name)
    key = (store.root.uri, run.name)
    if key in _held:
        yield
        return
    with ExitStack() as lock:
        lock.enter_context(store.root.lock(run.lock_path, f"Run '{run.name}'"))
        _held[key] = lock
        try:
            yield
        finally:
            _held.pop(key, None)


def was_finished(run: RunFolder) -> bool:
    """Return whether a run was ever finished, under whatever config."""
    return any(name.startswith(FINISHED) for name in run.store.root.list(layout.run(run.name)))


@contextmanager
def executing(context: RunContext) -> Iterator[None]:
    """Hold the run's lock, after clearing what killed processes of this machine left half-written.

    Raises:
        RunConflictError: another process executes the run.
    """
    root = context.store.root
    root.sweep()
    if (held := _held.pop((root.uri, context.run.name), None)) is not None:
        # What commits checks the lease that its own root holds.
        held.close()
    with root.lock(context.run.lock_path, f"Run '{context.run.name}'"):
        yield


def refuse_while_executing(store: ArtifactStore, name: str) -> None:
    """Check that no other process executes a run: a stage of its own would race with it.

    Raises:
        RunConflictError: one does.
        StoreError: the root cannot be written.
    """
    run = RunFolder(store, name)
    if (store.root.uri, run.name) not in _held:
        with store.root.lock(run.lock_path, f"Run '{run.name}'"):
            pass
