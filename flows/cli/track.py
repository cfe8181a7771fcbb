"""``flowmill track``: logs a run's curves, images and models again from committed artifacts."""

from __future__ import annotations

from typing import Annotated

import typer

from flowmill.configs.errors import TrackingError
from flowmill.flows.cli.options import Root, TrustStore
from flowmill.flows.console import console
from flowmill.flows.environment import existing_root


def track_command(
    run: Annotated[str, typer.Argument(help="Run.", metavar="RUN")],
    *,
    uri: Annotated[
        str | None, typer.Option("--uri", help="Another MLflow tracker than the run's own.", metavar="URI")
    ] = None,
    root: Root = None,
    trust_store: TrustStore = False,
) -> None:
    """Log the records of a run that a tracker lacks, and print the tracker's address."""
    from flowmill.tasks.inputs.store_trust import check_trusted
    from flowmill.tasks.runs.opening import open_run
    from flowmill.tasks.runs.staleness import is_complete
    from flowmill.tasks.tracking.series import SERIES, series_of
    from flowmill.tasks.tracking.tracker import Tracker

    place = existing_root(root)
    own = open_run(place, run, reads=True, trusted=trust_store)
    context = own
    if uri is not None:
        context = open_run(place, run, overrides=[f"tracking.uri={uri}"], reads=True, trusted=trust_store)
    if not trust_store:
        check_trusted(own.config, context.config, run=run, only=("tracking.uri", "tracking.registered_model"))
    complete = is_complete(context.chain)
    series, at_work = series_of(uri, own.config.tracking.uri), own.store.root.locked(own.run.lock_path)
    # The process at work sets the state in the run's own tracker.
    tracker = Tracker(context, orchestrator={}, attends=not at_work or series != SERIES, series=series)
    if complete and not at_work:
        tracker.log_export(context.config.run.epochs)
    failure = tracker.close("RUNNING" if at_work else "FINISHED" if complete else "KILLED")
    if failure is not None:
        raise TrackingError(f"Run '{run}' could not be logged to {tracker.uri}: {failure}")
    console.print(f"run '{run}' is logged to {tracker.uri}")
