"""``flowmill run``."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.errors import CancelledError, FlowmillError
from configs.load import load_config
from configs.schema import RunConfig
from flows.cli.console import as_overrides
from flows.cli.opening import notes, say, terminable
from flows.cli.progress import display
from flows.environment import prepare_environment, wants_traceback
from flows.server import LocalApi, local_api

if TYPE_CHECKING:
    from tasks.context import RunContext


def run_command(config: Path, *, root: str | None, name: str | None, overrides: Sequence[str], quiet: bool) -> None:
    """Start or continue a run and print what came of it."""
    extra = [*overrides, *as_overrides(root, name)]
    checked = load_config(config, extra)
    prepare_environment(checked.execution.threads)
    from tasks.names import check_names

    check_names(checked, source=config, overrides=overrides)
    from tasks.runs import find_run, finished_result

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
    from tasks.check import check_config
    from tasks.try_rewards import try_rewards

    check_config(checked, rewards=False)
    rewards = try_rewards(checked)
    from flows import runtime
    from flows.cli.summary import print_summary
    from flows.pipeline import pipeline
    from tasks.describe import describe_result

    with display(quiet=quiet, epochs=checked.run.epochs) as shown:
        runtime.use_reporter(shown)
        context = runtime.begin(checked)
        context.host.use_rewards(rewards)
        with runtime.opened(context), _progress_noted(context):
            run_flow(pipeline, api, config=config, name=checked.run.name, overrides=list(overrides))
    print_summary(context, describe_result(context), quiet=quiet)


@contextlib.contextmanager
def _progress_noted(context: RunContext) -> Iterator[None]:
    """Add to a signal what the run has by now."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as stop:
        done = max((entry.epoch for entry in context.run.entries() if entry.stage == "optimize"), default=0)
        stop.add_note(
            f"Run '{context.run.name}' in '{context.store.root.uri}' has {done} of {context.config.run.epochs} "
            "epochs, and the shards committed since."
        )
        raise


def run_flow(flow: Any, api: LocalApi | None, **parameters: Any) -> Any:
    """Run a flow in this process; our own errors come out as they are."""
    from prefect.settings import PREFECT_API_URL, PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

    # The traceback of a user's mistake belongs to the UI, not to the terminal: main() prints the message.
    for logger in (
        "prefect.flow_runs",
        "prefect.task_runs",
        "prefect.engine",
        "prefect.flow_engine",
        "prefect.task_engine",
    ):
        logging.getLogger(logger).setLevel(logging.CRITICAL)
    # The heartbeat is for workers that look for zombies, and costs every flow a second at its end.
    settings: dict[Any, Any] = {PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}
    if api is not None:
        settings[PREFECT_API_URL] = api.wait()
    with temporary_settings(settings), terminable():
        state = flow(**parameters, return_state=True)
        if state.is_cancelled():
            raise CancelledError(state.message)
        return _result(state)


def _result(state: Any) -> Any:
    result = state.result(raise_on_failure=False)
    if isinstance(result, BaseException):
        _stop_if_interrupted(result)
    if isinstance(result, FlowmillError) or (isinstance(result, BaseException) and wants_traceback()):
        raise result
    if isinstance(result, BaseException):
        raise FlowmillError(_explain(result))
    return result


def _stop_if_interrupted(error: BaseException) -> None:
    """End as Ctrl-C or SIGTERM would if one of them is behind an error."""
    from flows.cancellation import signal_behind

    found = signal_behind(error)
    if isinstance(found, KeyboardInterrupt):
        raise KeyboardInterrupt
    if isinstance(found, SystemExit):
        raise found
    if found is not None:
        sys.exit(128 + int(found.signal))


def _explain(error: BaseException) -> str:
    told = "".join(f" {note}" for note in notes(error))
    if told or (isinstance(error, OSError) and error.errno is not None):
        return (
            f"{type(error).__name__}: {error}.{told} What is committed stays; mend the cause and run the same command "
            "again."
        )
    return (
        f"{type(error).__name__}: {error}. This is not a known mistake; FLOWMILL_TRACEBACK=1 shows where it happened. "
        "What is committed stays."
    )
