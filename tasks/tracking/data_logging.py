"""Logs the data of a run to MLflow: its tables, and a grid of its first given images."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from configs.errors import StoreError
from tasks.metrics.image_grids import grid
from tasks.metrics.speed import committed_at
from tasks.metrics.view import RunView
from tasks.reports.data_tables import data_tables
from tasks.reports.report.samples import given_shots
from tasks.runs.context import RunContext
from tasks.tracking.logged import log_picture, log_table
from tasks.tracking.names import mlflow_name

if TYPE_CHECKING:
    from mlflow import MlflowClient


def data_logger(context: RunContext) -> Callable[[MlflowClient, str], None]:
    """Read the data of a run, and return a function that logs it, given a client and the id of the MLflow run."""
    chain = context.chain
    given = chain.find(*chain.plan.samples_of(0)) if chain.plan.given else None
    try:
        tables, shots = data_tables(context), given_shots(RunView(context))
        time_ms = committed_at(chain, [given.ref] if given else [])
    except StoreError as error:
        # A damaged answer of a rater does not make a finished run fail.
        context.reporter.message(f"The data of the run is not logged to MLflow: {error}")
        return lambda client, run_id: None
    pictures = [(shot, np.asarray(Image.open(io.BytesIO(shot.image)).convert("RGB"))) for shot in shots if shot.image]

    def log(client: MlflowClient, run_id: str) -> None:
        for title, rows in tables.items():
            path = f"data/{mlflow_name('folder', title.replace('/', ' ').replace(', ', ' - '))}.json"
            log_table(client, run_id, path, list(rows[0]), [list(row.values()) for row in rows])
        if pictures:
            captions = [(shot.prompt, shot.verdict) for shot, _ in pictures]
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "given.png"
                grid([pixels for _, pixels in pictures], captions, columns=6).save(file)
                log_picture(client, run_id, file, key="given", step=0, time_ms=time_ms)

    return log
