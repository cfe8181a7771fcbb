"""Points of curves as MLflow metrics."""

from __future__ import annotations

from typing import Any

from tasks.metrics.points import Point
from tasks.tracking.names import mlflow_name


def metric_of(point: Point, time_ms: int, *, model: str | None = None, dataset: tuple[str, str] | None = None) -> Any:
    """Return the MLflow metric of a point.

    Args:
        point: the point.
        time_ms: commit time of the point's source, in milliseconds since 1970.
        model: for a score: id of the logged model.
        dataset: for a score: name and digest of the prompt list.
    """
    from mlflow.entities import Metric

    name, digest = dataset if dataset is not None else (None, None)
    return Metric(
        mlflow_name("metric", point.key),
        float(point.value),
        time_ms,
        point.step,
        model_id=model if point.split else None,
        dataset_name=name,
        dataset_digest=digest,
    )
