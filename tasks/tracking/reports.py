"""Reports as artifacts of MLflow runs."""

from __future__ import annotations

from flowmill.configs.errors import TrackingError
from flowmill.configs.escaping import command
from flowmill.configs.roots import root_option
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.tracking.locations import REPORT, tracking_uri
from flowmill.tasks.tracking.series import SERIES


def log_report(context: RunContext, html: str) -> str:
    """Log a report to a run's MLflow run, replacing an earlier report, and return its location."""
    from flowmill.tasks.tracking.client import open_client, reaching

    uri = tracking_uri(context.store.root.uri, context.config.tracking.uri)
    note = context.run.newest(SERIES)
    if note is None:
        how = command("flowmill", "track", context.run.name, *root_option(context.store.root.uri))
        raise TrackingError(f"Run '{context.run.name}' is not in MLflow yet. Log it: {how}")
    with reaching(uri, "The report"):
        client = open_client(context.store.root.uri, context.config.tracking.uri)
        client.log_text(str(note["mlflow_run_id"]), html, REPORT)
    return f"{uri}, run {note['mlflow_run_id']}"
