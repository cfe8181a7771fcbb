"""The records of a run's MLflow runs: a series per tracker."""

from __future__ import annotations

from flowmill.configs.fingerprint import hash_text
from flowmill.storage import layout
from flowmill.storage.artifacts.records import content
from flowmill.tasks.runs.context import RunContext

SERIES = "tracking"


def series_of(uri: str | None, own: str | None) -> str:
    """Return the series of records of a tracker: the default one, or a separate one for another address."""
    return SERIES if uri is None or uri == own else f"{SERIES}-{hash_text(uri)[:12]}"


def recorded_runs(context: RunContext) -> frozenset[str]:
    """Return the ids of all MLflow runs of a run, of any tracker."""
    names = context.store.root.list(layout.run(context.run.name))
    series = [context.run.series(name) for name in names if name == SERIES or name.startswith(f"{SERIES}-")]
    notes = [content(data, path) for each in series for path, data in each.items()]
    return frozenset(note["mlflow_run_id"] for note in notes)
