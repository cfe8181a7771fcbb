"""Where a run is tracked; imports no MLflow."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

#: Name of the folder with images, configs and models beside the database.
ARTIFACTS = "mlflow-artifacts"
#: A view of an experiment's runs that its address can name, and the experiment's tag with it.
VIEW = "flowmill"
VIEW_TAG = f"mlflow.sharedViewState.{VIEW}"
#: Without it MLflow may open in the view of language model applications.
_KIND = "workflowType=machine_learning"
#: A run's report among the files of its MLflow run.
REPORT = "report.html"


def tracking_uri(root: str, configured: str | None) -> str:
    """Return the configured tracking URI, or that of the SQLite file in ``tracking_folder``."""
    return configured or f"sqlite:///{tracking_folder(root) / 'mlflow.db'}"


def tracking_folder(root: str) -> Path:
    """Return where MLflow's files are when no tracking URI is configured.

    That is the store itself, or ./flowmill-tracking for a store that is not a local folder.
    """
    return Path.cwd() / "flowmill-tracking" if "://" in root else Path(root)


def runs_page(root: str) -> str:
    """Return where, below MLflow's address, the runs of a store are listed with their scores."""
    database = tracking_folder(root) / "mlflow.db"
    try:
        with closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            found = connection.execute("SELECT experiment_id FROM runs ORDER BY start_time DESC LIMIT 1").fetchone()
            view = connection.execute(
                "SELECT 1 FROM experiment_tags WHERE experiment_id = ? AND key = ?", (*(found or (0,)), VIEW_TAG)
            ).fetchone()
    except sqlite3.Error:
        # Nothing was tracked yet.
        found = view = None
    if found is None:
        return f"/#/experiments?{_KIND}"
    named = f"&viewStateShareKey={VIEW}" if view else ""
    return f"/#/experiments/{found[0]}/runs?{_KIND}{named}"
