"""Pictures with a step slider, large enough to read.

MLflow's ``log_image`` stores a copy of 256 pixels next to each picture and shows that copy in the middle of a square
as wide as the chart. This module writes the same two files, but the copy is a full-width square with the grid at its
top.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from uuid import NAMESPACE_URL, uuid5

from mlflow import MlflowClient
from PIL import Image

from tasks.metrics.image_grids import squared
from tasks.tracking.names import epoch_digits, mlflow_name

_FOLDER = "images"
_QUALITY = 80


def log_picture(client: MlflowClient, run_id: str, path: Path, *, key: str, step: int, time_ms: int) -> None:
    """Log a PNG file as one step of the slider ``key``; logging it again replaces it.

    Earlier versions did not pad the step with zeros; their files keep their names.
    """
    known = {Path(each.path).name for each in client.list_artifacts(run_id, _FOLDER)}
    earlier, name = (_name(key, digits, time_ms) for digits in (str(step), epoch_digits(step)))
    name = earlier if f"{earlier}.png" in known else name
    with tempfile.TemporaryDirectory() as folder, Image.open(path) as image:
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
