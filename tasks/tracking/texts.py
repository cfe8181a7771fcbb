"""Texts of evaluations as MLflow tables.

MLflow's ``log_table`` reads the file it appends to, and does not support addresses relative to a store.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from configs.escaping import visible
from tasks.metrics.texts import Text
from tasks.tracking.names import epoch_digits, mlflow_name

if TYPE_CHECKING:
    from mlflow import MlflowClient

#: Tag that lists the artifacts MLflow can show as tables, also for a comparison of runs.
_TAG = "mlflow.loggedArtifacts"
#: Number of earlier tables kept in the list, as a tag's value is limited.
_MOST = 30


def log_texts(client: MlflowClient, run_id: str, texts: Sequence[Text], *, place: str, epoch: int) -> None:
    """Log the first texts of an evaluation as a table."""
    path = f"{mlflow_name('folder', place)}/texts_epoch_{epoch_digits(epoch)}.json"
    rows = [[visible(value, keep="\n\t") for value in text] for text in texts]
    client.log_text(run_id, json.dumps({"columns": Text._fields, "data": rows}), path)
    tables = json.loads(client.get_run(run_id).data.tags.get(_TAG, "[]"))
    if (table := {"path": path, "type": "table"}) not in tables:
        client.set_tag(run_id, _TAG, json.dumps([*tables[-_MOST:], table]))
