"""Where a run is tracked; imports no MLflow."""

from __future__ import annotations

from pathlib import Path

#: Name of the folder with images, configs and models beside the database.
ARTIFACTS = "mlflow-artifacts"
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
