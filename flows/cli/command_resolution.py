"""Resolves the request for a run, in the same way for ``run`` and ``run --dry``."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from configs.load import load_config, override_config
from configs.schema import RunConfig
from flows.environment import as_overrides, prepare_environment
from flows.requests import PipelineRequest

if TYPE_CHECKING:
    from tasks.runs.context import RunContext


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A resolved request to start or continue a run."""

    config: RunConfig
    """The config, with the epochs that the run will have."""
    request: PipelineRequest
    """The equivalent request of the flow."""
    found: RunContext | None
    """The run, if it exists with the same settings."""
    conflicts: tuple[str, ...]
    """Settings that differ from those of the existing run of that name."""
    note: str | None
    """A note on the run's length, if there is one."""


def understood(request: PipelineRequest, *, claim: ExitStack | None = None) -> Asked:
    """Return the resolved request; nothing is created, and the lock is checked before heavy libraries are loaded.

    Args:
        request: the user's request.
        claim: holds the run's lock from now on, if the run is to be executed. The lock of a finished run is only
            checked, since there may be no work, and then nothing is written.

    Raises:
        ConfigError: something in the config cannot work.
        PromptError: a prompt source cannot be used.
        RunConflictError: another process executes the run.
    """
    extra = [*request.overrides, *as_overrides(request.root, request.name)]
    given = load_config(request.config, extra)
    prepare_environment(given.execution.threads)
    from tasks.checks.names import check_names

    check_names(given, source=Path(request.config), overrides=request.overrides)
    from storage.artifacts.commit import ArtifactStore
    from storage.artifacts.lineage import RunFolder
    from tasks.runs.locks import holding, run_name, was_finished

    store = ArtifactStore(given.store)
    run = RunFolder(store, run_name(given))
    if claim is not None and (store.root.locked(run.lock_path) or not was_finished(run)):
        claim.enter_context(holding(store, run.name))
    from tasks.runs.context import RunContext
    from tasks.runs.epoch_count import kept_length, length_note
    from tasks.runs.extension import trained
    from tasks.runs.opening import conflicts

    changed = conflicts(run, given)
    found = RunContext(store, given, run) if changed == [] else None
    if request.advance is not None:
        config = override_config(given, [f"run.epochs={(trained(found) if found else 0) + request.advance}"])
    else:
        config = given if changed else kept_length(given, rewind=request.rewind)
    if config is not given:
        extra.append(f"run.epochs={config.run.epochs}")
    return Asked(
        config=config,
        request=request.model_copy(update={"overrides": extra, "root": None, "name": config.run.name}),
        found=RunContext(store, config, run) if found else None,
        conflicts=tuple(changed or ()),
        note=length_note(given, config) if request.advance is None else None,
    )
