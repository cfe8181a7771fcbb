"""``flowmill stage``: runs one stage of one epoch, and reports the stages that become due."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from flowmill.configs.errors import ConfigError
from flowmill.flows.cli.error_reporting import say
from flowmill.flows.cli.options import Quiet
from flowmill.flows.cli.run import run_flow
from flowmill.flows.console import console
from flowmill.flows.environment import existing_root
from flowmill.flows.requests import ContinueRequest, StageRequest
from flowmill.storage.layout import ArtifactRef

if TYPE_CHECKING:
    from flowmill.storage.artifacts.commit import ArtifactStore


def stage_command(
    name: Annotated[str, typer.Argument(help="Stage: base, encode, preprocess, rollout, score, ...", metavar="NAME")],
    request: StageRequest,
    *,
    downstream: Annotated[
        bool, typer.Option("--downstream", help="Afterwards run the stages that became due.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Run one stage of an existing run; print its artifacts and the stages that become due."""
    uri = existing_root(request.root if "root" in request.model_fields_set else None)
    say(f"{name} of run '{request.run}': loading", quiet=quiet)
    from flowmill.tasks.specs.stages import stage_spec

    stage_spec(name)
    _run(name, request.model_copy(update={"root": uri}), downstream=downstream, quiet=quiet)


def _run(name: str, request: StageRequest, *, downstream: bool = False, quiet: bool) -> None:
    from flowmill.tasks.runs.locks import refuse_while_executing
    from flowmill.tasks.runs.opening import open_run

    if downstream and request.overrides:
        raise ConfigError(
            "--downstream follows the run's own settings, but --set gives this stage others, so nothing of the run "
            "depends on it. Leave one of them out; a run with other settings has another name: flowmill run --name."
        )
    trusted = request.trust_store
    settings = open_run(request.root, request.run, overrides=request.overrides, reads=True, trusted=trusted)
    # Before heavy imports; a scheduled flow waits instead.
    refuse_while_executing(settings.store, request.run)
    from flowmill.flows.progress import display
    from flowmill.flows.server import local_api
    from flowmill.tasks.checks.names import check_names
    from flowmill.tasks.runs.extension import chosen_epoch

    # One stage may need none of the files that the run's options name.
    check_names(settings.config, overrides=request.overrides, later=True)
    epoch = chosen_epoch(settings, name, request.epoch)
    with local_api() as api, display(quiet=quiet, epochs=1) as shown:
        from flowmill.flows import process_state
        from flowmill.flows.stages import FLOWS

        process_state.use_reporter(shown)
        for result in run_flow(FLOWS[name], api, request):
            console.print(str(result))
        separate = bool(request.overrides or request.evaluation)
        due = [] if separate else _due(settings.store, request, epoch, name)
        if not quiet:
            _print_due(due, separate=separate, downstream=downstream)
        if due and downstream:
            from flowmill.flows.pipeline import bring_up_to_date

            run_flow(
                bring_up_to_date,
                api,
                ContinueRequest(run=request.run, root=request.root, trust_store=trusted),
            )
            console.print(f"run '{request.run}' is up to date.")


def _due(store: ArtifactStore, request: StageRequest, epoch: int, stage: str) -> list[str]:
    from flowmill.tasks.runs.opening import open_run
    from flowmill.tasks.runs.staleness import due

    chain = open_run(store.root.uri, request.run, reads=True, trusted=request.trust_store).chain
    nodes = [node for node in chain.nodes() if node[:2] == (epoch, stage)]
    lines = [f"{status.node} ({status.state.value})" for node in nodes for status in due(chain, node)]
    return list(dict.fromkeys(lines))


def _print_due(due: Sequence[str], *, separate: bool, downstream: bool) -> None:
    if separate:
        console.print(
            "These settings are not the run's: the result is a side result, kept next to the run, which stays as it is."
        )
    elif not due:
        console.print("Nothing of the run is due because of it.")
    else:
        shown = ", ".join(due[:6]) + (f" and {len(due) - 6} more" if len(due) > 6 else "")
        how = "" if downstream else " --downstream, or 'flowmill run' with the run's config, runs them."
        console.print(f"due now: {shown}.{how}")


def check_makers(store: ArtifactStore, damaged: Mapping[ArtifactRef, Collection[str]], *, trust_store: bool) -> None:
    """Check that the runs which regenerate damaged artifacts first can be opened and are trusted."""
    from flowmill.tasks.runs.opening import open_run

    first = {run for ref, runs in damaged.items() for run in sorted(runs)[: None if ref.kind == "embeddings" else 1]}
    for run in sorted(first):
        open_run(store.root.uri, run, trusted=trust_store)


def regenerate(
    store: ArtifactStore, damaged: Mapping[ArtifactRef, Collection[str]], *, trust_store: bool = False
) -> None:
    """Rerun the stages of damaged artifacts, in the order of their runs.

    Args:
        damaged: artifact -> runs that name it.
        trust_store: run code and commands that only the store names.
    """
    from flowmill.flows.server import local_api
    from flowmill.storage.maintenance.quarantine import leave_trace
    from flowmill.tasks.runs.repairs import makers

    for ref, runs in damaged.items():
        if not runs:
            console.print(f"{ref}: no run names it, so it is not regenerated.")
    waiting = {ref: sorted(runs) for ref, runs in damaged.items() if runs}
    with local_api() if waiting else contextlib.nullcontext():
        while waiting:
            # One run is enough if its settings are still the artifact's; embeddings need all, each has its own prompts.
            now = {ref: runs.pop(0) for ref, runs in waiting.items()}
            for run, stage, epoch in makers(store, now, trusted=trust_store):
                request = StageRequest(run=run, root=store.root.uri, epoch=epoch, trust_store=trust_store)
                _run(stage, request, quiet=True)
            waiting = {ref: runs for ref, runs in waiting.items() if runs and store.manifest(ref) is None}
    for ref, runs in damaged.items():
        if runs and store.manifest(ref) is None and ref.kind != "embeddings":
            traced = leave_trace(store, ref, "damaged, and made with settings that no run has any more")
            state = "stays as a trace without its files" if traced else "is lost with its records"
            console.print(
                f"{ref} was made with settings that run '{min(runs)}' does not have, or not any more, and {state}; run "
                "its stage with them again if you need it.",
            )
