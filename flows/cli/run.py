"""``flowmill run``."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowmill.configs.errors import ConfigError
from flowmill.configs.exits import StopSignal
from flowmill.configs.gc_tuning import collect_as_usual, starting
from flowmill.flows.cli.error_reporting import say
from flowmill.flows.cli.options import Quiet
from flowmill.flows.cli.signals import terminable
from flowmill.flows.requests import PipelineRequest, Request

if TYPE_CHECKING:
    from flowmill.flows.cli.command_resolution import ResolvedRequest
    from flowmill.flows.server import LocalApi
    from flowmill.tasks.runs.context import RunContext


def run_command(
    request: PipelineRequest,
    *,
    epochs: Annotated[
        int | None, typer.Option("--epochs", help="Number of epochs, as --set run.epochs=N.", metavar="N", min=0)
    ] = None,
    dry: Annotated[bool, typer.Option("--dry", help="List the work to compute, the reasons, and the cost.")] = False,
    quiet: Quiet = False,
) -> None:
    """Start or continue a run and print its results, or with ``dry`` list the work to compute."""
    say(f"reading {request.config}", quiet=quiet)
    from flowmill.flows.chained import chained
    from flowmill.flows.cli.command_resolution import understood
    from flowmill.flows.environment import chosen_root

    if request.rewind and request.advance is not None:
        raise ConfigError("--advance trains more epochs and --rewind ends a run earlier. Leave one of them out.")
    if epochs is not None and (request.rewind or request.advance is not None):
        raise ConfigError(
            "--epochs is the length of a run, which --advance adds to and --rewind takes from the config: use one of "
            f"them (to end a longer run earlier: --rewind --set run.epochs={epochs})."
        )
    length = [] if epochs is None else [f"run.epochs={epochs}"]
    overrides = [*request.overrides, *length]
    request = request.model_copy(update={"root": chosen_root(request.root), "overrides": overrides})
    with contextlib.ExitStack() as claim:
        resolved = [understood(each, claim=None if dry else claim) for each in chained(request)]
        for each in resolved:
            say(each.note or "", quiet=quiet or each.note is None)
        if dry:
            from flowmill.flows.cli.dry_run import dry_command

            dry_command(resolved)
            return
        due = [each for each in resolved if not _finished(each, quiet=quiet)]
        if due:
            from flowmill.storage.artifacts.commit import ArtifactStore
            from flowmill.tasks.runs.locks import holding

            for each in due:
                claim.enter_context(holding(ArtifactStore(each.config.store), str(each.config.run.name)))
            say(f"{', then '.join(str(each.config.run.name) for each in due)}: loading torch and Prefect", quiet=quiet)
            from flowmill.flows.server import local_api

            with local_api() as api:
                _train(due, api, quiet=quiet)


def _finished(resolved: ResolvedRequest, *, quiet: bool) -> bool:
    """Return whether the run has nothing left to compute; its results are printed then."""
    from flowmill.tasks.runs.opening import finished_result, note_moves, refuse_other_settings

    config, run = resolved.config, resolved.run
    refuse_other_settings(config, resolved.conflicts)
    result = None if run is None else finished_result(run)
    if run is not None and result is not None:
        from flowmill.flows.cli.summary import print_summary

        note_moves(run)
        if resolved.request.show and not quiet:
            _print_samples(run, resolved.request.show)
        print_summary(run, result, quiet=quiet)
    return result is not None


def _print_samples(run: RunContext, count: int) -> None:
    from flowmill.tasks.metrics.view import RunView
    from flowmill.tasks.reports.sample_lines import sample_lines

    view = RunView(run)
    for epoch in view.evaluations:
        for line in sample_lines(view, epoch, count):
            say(line)


def _train(due: Sequence[ResolvedRequest], api: LocalApi | None, *, quiet: bool) -> None:
    with starting():
        from flowmill.flows.chained import named
        from flowmill.tasks.checks.check import check_plan
        from flowmill.tasks.checks.try_rewards import reach_engines, try_rewards
        from flowmill.tasks.specs.plan import RunPlan

        # The first run comes last, and keeps its rewards; those of later runs are created again at their turn.
        for each in reversed(due):
            with named(each.config, due):
                plan = RunPlan(each.config)
                check_plan(plan, rewards=False)
                rewards = try_rewards(plan)
                reach_engines(each.config)
        from flowmill.flows import process_state
        from flowmill.flows.cli.summary import print_summary
        from flowmill.flows.pipeline import pipeline
        from flowmill.flows.progress import display
        from flowmill.tasks.metrics.describe import describe_result
        from flowmill.tasks.runs.epoch_count import remember_length

    for resolved in due:
        with display(quiet=quiet, epochs=resolved.config.run.epochs) as shown:
            process_state.use_reporter(shown)
            context = process_state.begin(resolved.config)
            if resolved.request.advance is not None:
                remember_length(context.run, resolved.config.run.epochs, advance=resolved.request.advance)
            with process_state.opened(context) as session, _progress_noted(context):
                if resolved is due[0]:
                    session.host.rewards.take(rewards)
                # The overrides already contain the number of epochs.
                run_flow(pipeline, api, resolved.request.model_copy(update={"advance": None}))
        print_summary(context, describe_result(context), quiet=quiet)


@contextlib.contextmanager
def _progress_noted(context: RunContext) -> Iterator[None]:
    try:
        yield
    except StopSignal as stop:
        done = max((entry.epoch for entry in context.run.entries() if entry.stage == "optimize"), default=0)
        last = context.config.run.epochs
        stop.add_note(
            f"Run '{context.run.name}' in '{context.store.root.uri}' has {min(done, last)} of {last} "
            "epochs, and the shards committed since."
        )
        raise


def run_flow(flow: Any, api: LocalApi | None, request: Request) -> Any:
    """Run a flow in this process; flowmill's own errors propagate unchanged.

    Raises:
        FlowmillError: the flow failed.
        CancelledError: the flow was cancelled.
        StopSignal: a signal stopped it.
    """
    from flowmill.flows.run_in_process import on_server, outcome

    collect_as_usual()
    with on_server(api), terminable():
        try:
            return outcome(flow(request, return_state=True))
        except KeyboardInterrupt:
            # A library restored Python's default handler.
            raise StopSignal(128 + signal.SIGINT) from None
