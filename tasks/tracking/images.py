"""Pictures with a step slider, large enough to read.

MLflow's own ``log_image`` keeps a copy of 256 pixels beside each picture, and shows that copy, in the middle of a
square as wide as the chart. This writes the same two files with a copy of full width, square, with the grid at its top.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from uuid import uuid4

from mlflow import MlflowClient
from PIL import Image

from tasks.figures.pictures import squared

_FOLDER = "images"
_QUALITY = 80


def log_picture(client: MlflowClient, run_id: str, path: Path, *, key: str, step: int) -> None:
    """Log a PNG file as one step of the slider ``key``."""
    name = f"{key.replace('/', '~')}+step+{step}+timestamp+{int(time.time() * 1000)}+{uuid4()}"
    with tempfile.TemporaryDirectory() as folder, Image.open(path) as image:
        full, shown = Path(folder) / f"{name}.png", Path(folder) / f"{name}+compressed.webp"
        shutil.copyfile(path, full)
        squared(image.convert("RGB")).save(shown, quality=_QUALITY)
        for file in (full, shown):
            client.log_artifact(run_id, str(file), _FOLDER)
    client.set_tag(run_id, "mlflow.loggedImages", "True")
