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
    """Id of the MLflow run this one is shown below, such as that of a sweep."""
    report: bool | None = None
    """Log 'flowmill report' of a run that has ended; absent: where a lasting Prefect server carries it out."""

    assets: bool = False
    """Report every committed artifact to Prefect as a materialized asset, with its inputs."""
