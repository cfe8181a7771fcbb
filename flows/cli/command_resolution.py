"""What a person asks of a run, understood once, so that ``run`` and ``run --dry`` speak of the same."""

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
    """A run that is to be made or gone on with."""

    config: RunConfig
    """With the epochs the run will have."""
    request: PipelineRequest
    """The same for the flow."""
    found: RunContext | None
    """The run, if it exists with the same settings."""
    conflicts: tuple[str, ...]
    """Settings in which the run of that name differs: it is another."""
    note: str | None
    """What is to be said about its length."""


def understood(request: PipelineRequest, *, claim: ExitStack | None = None) -> Asked:
    """Return what is asked for; nothing is made, and no heavy library is loaded before another process is seen.

    Args:
        request: what a person wrote.
        claim: holds the run's lock from now on, where the run is to be executed. A run that was finished may have
            nothing to do, which writes nothing: its lock is looked at.

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
    from storage.commit import ArtifactStore
    from storage.lineage import RunFolder
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
