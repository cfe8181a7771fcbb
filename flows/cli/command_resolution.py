"""Resolves the request for a run, in the same way for ``run`` and ``run --dry``."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flowmill.configs.load import load_config, override_config
from flowmill.configs.schema import RunConfig
from flowmill.flows.environment import as_overrides, prepare_environment
from flowmill.flows.requests import PipelineRequest

if TYPE_CHECKING:
    from flowmill.tasks.runs.context import RunContext


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRequest:
    """A resolved request to start or continue a run."""

    config: RunConfig
    """The config, with the epochs that the run will have."""
    request: PipelineRequest
    run: RunContext | None
    """The run, if it exists with the same settings."""
    conflicts: tuple[str, ...]
    """Settings that differ from those of the existing run of that name."""
    note: str | None
    """A note on the run's length, if there is one."""


def understood(request: PipelineRequest, *, claim: ExitStack | None = None) -> ResolvedRequest:
    """Return the resolved request; nothing is created, and the lock is checked before heavy libraries are loaded.

    Args:
        request: the user's request.
        claim: holds the run's lock from now on, if the run is to be executed. The lock of a finished run is only
            checked, since there may be no work, and then nothing is written.
    """
    extra = [*request.overrides, *as_overrides(request.root, request.name)]
    requested = load_config(request.config, extra)
    prepare_environment(requested.execution.threads)
    from flowmill.tasks.checks.names import check_names

    check_names(requested, source=Path(request.config), overrides=request.overrides)
    from flowmill.storage.artifacts.commit import ArtifactStore
    from flowmill.storage.artifacts.lineage import RunFolder
    from flowmill.tasks.runs.locks import holding, run_name, was_finished

    store = ArtifactStore(requested.store)
    run = RunFolder(store, run_name(requested))
    if claim is not None and (store.root.locked(run.lock_path) or not was_finished(run)):
        claim.enter_context(holding(store, run.name))
    from flowmill.tasks.runs.context import RunContext
    from flowmill.tasks.runs.epoch_count import kept_length, length_note
    from flowmill.tasks.runs.extension import advance_note, advanced
    from flowmill.tasks.runs.opening import conflicts, with_columns_of_run

    requested = with_columns_of_run(requested)
    changed = conflicts(run, requested)
    context = RunContext(store, requested, run) if changed == [] else None
    if request.advance is not None:
        epochs = advanced(context, request.advance) if context else request.advance
        config = override_config(requested, [f"run.epochs={epochs}"])
        note = advance_note(context, request.advance, epochs) if context else None
    else:
        config = requested if changed else kept_length(requested, rewind=request.rewind)
        note = length_note(requested, config)
    if config is not requested:
        extra.append(f"run.epochs={config.run.epochs}")
    return ResolvedRequest(
        config=config,
        request=request.model_copy(update={"overrides": extra, "root": None, "name": config.run.name}),
        run=RunContext(store, config, run) if context else None,
        conflicts=tuple(changed or ()),
        note=note,
    )
