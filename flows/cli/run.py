"""``flowmill run``."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.garbage import collect_as_usual, starting
from configs.load import load_config
from configs.schema import RunConfig
from flows.cli.opening import say
from flows.cli.stopping import terminable
from flows.environment import as_overrides, prepare_environment
from flows.progress import display
from flows.server import LocalApi, local_api

if TYPE_CHECKING:
    from flows.requests import Request
    from tasks.runs.context import RunContext


def advanced(
    config: Path, overrides: Sequence[str], *, root: str | None, name: str | None, advance: int | None
) -> list[str]:
    """Return overrides with which a run has some epochs more than it has now; None: as many as they say."""
    if advance is None:
        return [*overrides]
    from tasks.runs.advance import trained
    from tasks.runs.opening import find_run

    found = find_run(load_config(config, [*overrides, *as_overrides(root, name)]))
    return [*overrides, f"run.epochs={(0 if found is None else trained(found)) + advance}"]


def run_command(config: Path, *, root: str | None, name: str | None, overrides: Sequence[str], quiet: bool) -> None:
    """Start or continue a run and print what came of it."""
    extra = [*overrides, *as_overrides(root, name)]
    checked = load_config(config, extra)
    prepare_environment(checked.execution.threads)
    from tasks.preflight.names import check_names

    check_names(checked, source=config, overrides=overrides)
    from tasks.runs.opening import find_run, finished_result

    found = find_run(checked)
    result = None if found is None else finished_result(found)
    if found is not None and result is not None:
        from flows.cli.summary import print_summary

        print_summary(found, result, quiet=quiet)
        return
    if found is not None:
        # Says so before anything heavy starts; the flow holds the lock while it works.
        with found.store.root.lock(found.run.lock_path, f"Run '{found.run.name}'"):
            pass
    say(f"{checked.run.name}: loading torch and Prefect", quiet=quiet)
    with local_api() as api:
        _train(str(config), checked, extra, api, quiet=quiet)


def _train(config: str, checked: RunConfig, overrides: Sequence[str], api: LocalApi | None, *, quiet: bool) -> None:
    with starting():
        from tasks.preflight.check import check_config
        from tasks.preflight.try_rewards import try_rewards

        check_config(checked, rewards=False)
        rewards = try_rewards(checked)
        from flows import runtime
        from flows.cli.summary import print_summary
        from flows.pipeline import pipeline
        from flows.requests import PipelineRequest
        from tasks.figures.describe import describe_result

    with display(quiet=quiet, epochs=checked.run.epochs) as shown:
        runtime.use_reporter(shown)
        context = runtime.begin(checked)
        with runtime.opened(context) as execution, _progress_noted(context):
            execution.host.use_rewards(rewards)
            run_flow(pipeline, api, PipelineRequest(config=config, name=checked.run.name, overrides=list(overrides)))
    print_summary(context, describe_result(context), quiet=quiet)


@contextlib.contextmanager
def _progress_noted(context: RunContext) -> Iterator[None]:
    """Add to a signal what the run has by now."""
    try:
        yield
    except SystemExit as stop:
        done = max((entry.epoch for entry in context.run.entries() if entry.stage == "optimize"), default=0)
        stop.add_note(
            f"Run '{context.run.name}' in '{context.store.root.uri}' has {done} of {context.config.run.epochs} "
            "epochs, and the shards committed since."
        )
        raise


def run_flow(flow: Any, api: LocalApi | None, request: Request) -> Any:
    """Run a flow in this process; our own errors come out as they are.

    Raises:
        FlowmillError: it failed.
        CancelledError: it was cancelled.
        SystemExit: a signal stopped it.
    """
    from flows.calls import on_server, outcome

    collect_as_usual()
    with on_server(api), terminable():
        try:
            return outcome(flow, request)
        except KeyboardInterrupt:
            # Where a library put Python's own handler back.
            sys.exit(128 + signal.SIGINT)
