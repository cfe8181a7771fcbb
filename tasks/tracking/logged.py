"""Points, pictures and texts of a run in the form of MLflow.

Pictures have a step slider and are large enough to read. MLflow's ``log_image`` stores a copy of 256 pixels next to
each picture and shows that copy in the middle of a square as wide as the chart. This module writes the same two files,
but the copy is a full-width square with the grid at its top. MLflow's ``log_table`` reads the file it appends to, and
does not support addresses relative to a store.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import NAMESPACE_URL, uuid5

from PIL import Image

from flowmill.configs.escaping import visible
from flowmill.tasks.metrics.image_grids import squared
from flowmill.tasks.metrics.texts import Text
from flowmill.tasks.metrics.tracked import Point
from flowmill.tasks.tracking.names import epoch_digits, mlflow_name

if TYPE_CHECKING:
    from mlflow import MlflowClient

_FOLDER = "images"
_QUALITY = 80


def log_picture(client: MlflowClient, run_id: str, path: Path, *, key: str, step: int, time_ms: int) -> None:
    """Log a PNG file as one step of the slider ``key``; logging it again replaces it.

    Earlier versions did not pad the step with zeros; their files keep their names.
    """
    existing = {Path(each.path).name for each in client.list_artifacts(run_id, _FOLDER)}
    earlier, name = (_name(key, digits, time_ms) for digits in (str(step), epoch_digits(step)))
    name = earlier if f"{earlier}.png" in existing else name
    with tempfile.TemporaryDirectory() as folder, Image.open(path, formats=["PNG"]) as image:
        full, shown = Path(folder) / f"{name}.png", Path(folder) / f"{name}+compressed.webp"
        shutil.copyfile(path, full)
        squared(image.convert("RGB")).save(shown, quality=_QUALITY)
        for file in (full, shown):
            client.log_artifact(run_id, str(file), _FOLDER)
    client.set_tag(run_id, "mlflow.loggedImages", "True")


def _name(key: str, step: str, time_ms: int) -> str:
    """Return the file name, without extension, that MLflow's pages read key, step and time from."""
    name = f"{mlflow_name('file', key.replace('/', '~'))}+step+{step}+timestamp+{time_ms}"
    return f"{name}+{uuid5(NAMESPACE_URL, name)}"


#: Tag that lists the artifacts MLflow can show as tables, also for a comparison of runs.
_TAG = "mlflow.loggedArtifacts"
#: Number of earlier tables in the list, as a tag's value is limited.
_MOST = 30


def log_texts(client: MlflowClient, run_id: str, texts: Sequence[Text], *, place: str, epoch: int) -> None:
    """Log the first texts of an evaluation as a table that MLflow's pages show; logging it again replaces it."""
    path = f"{mlflow_name('folder', place)}/texts_epoch_{epoch_digits(epoch)}.json"
    cells = [[visible(value, keep="\n\t") for value in text] for text in texts]
    client.log_text(run_id, json.dumps({"columns": list(Text._fields), "data": cells}), path)
    tables = json.loads(client.get_run(run_id).data.tags.get(_TAG, "[]"))
    if (table := {"path": path, "type": "table"}) not in tables:
        client.set_tag(run_id, _TAG, json.dumps([*tables[-_MOST:], table]))


def metric_of(point: Point, time_ms: int, *, model: str | None = None, dataset: tuple[str, str] | None = None) -> Any:
    """Return the MLflow metric of a point.

    Args:
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
