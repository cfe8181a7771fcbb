"""Settings of tracking."""

from __future__ import annotations

from configs.base import Section


class TrackingSection(Section):
    """MLflow."""

    uri: str | None = None
    """Tracking URI; a SQLite file inside the store (for one on S3 in ./flowmill-tracking) when absent."""
    experiment: str = "flowmill"
    """MLflow experiment."""
    registered_model: str | None = None
    """Name in the model registry; "flowmill-<run name>" when absent."""
    parent: str | None = None
    """Id of the parent MLflow run, such as that of a sweep."""
    report: bool | None = None
    """Log the 'flowmill report' of a finished run; when absent, only if it runs on a lasting Prefect server."""

    assets: bool = False
    """Report every committed artifact to Prefect as a materialized asset, with its inputs."""
