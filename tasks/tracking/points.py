"""Points of curves as MLflow takes them."""

from __future__ import annotations

from typing import Any

from tasks.metrics.points import Point
from tasks.tracking.names import mlflow_name


def metric_of(point: Point, time_ms: int, *, model: str | None = None, dataset: tuple[str, str] | None = None) -> Any:
    """Return a point as MLflow takes it.

    Args:
        point: the point.
        time_ms: when what it is read from was committed, in milliseconds since 1970.
        model: id of the logged model that has it, where it is a score.
        dataset: name and digest of the prompt list that it is a score on.
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
