"""How MLflow shows the list of runs: with their scores as columns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tasks.metrics.points import ACHIEVED
from tasks.metrics.tracked import EvaluationContent
from tasks.tracking.locations import VIEW_TAG
from tasks.tracking.names import mlflow_name

if TYPE_CHECKING:
    from mlflow import MlflowClient

_ATTRIBUTES = ("attributes.`Created`", "attributes.`Duration`")
#: What every run has.
_FIRST = (*(f"metrics.`{ACHIEVED}/{name}`" for name in ("heldout", "train", "rollout")), "params.`algorithm`")
#: Columns of single rewards; more than a window shows are no table.
_MOST = 4
#: Pixels of a column whose whole name is to be seen: of each letter, and beside them.
_LETTER, _BESIDE = 7, 40


def show_scores(client: MlflowClient, experiment_id: str, made: EvaluationContent) -> None:
    """Have the experiment's list of runs show the scores of an evaluation, beside those it shows already."""
    tags = client.get_experiment(experiment_id).tags
    before = tags.get(VIEW_TAG)
    known = _columns(before)
    means = [mlflow_name("metric", point.key) for point in made.points if point.split and point.key.endswith("_mean")]
    # Held-out prompts say more.
    scores = [f"metrics.`{key}`" for key in sorted(means, key=lambda key: "/heldout/" not in key)]
    shown = list(dict.fromkeys([*known, *scores]))[:_MOST]
    state = {
        "selectedColumns": [*_ATTRIBUTES, *_FIRST, *shown],
        "columnOrder": [*_ATTRIBUTES, *_FIRST, *shown],
        "columnWidths": {name: _LETTER * len(name.split("`")[1]) + _BESIDE for name in (*_FIRST, *shown)},
        "orderByKey": "attributes.start_time",
        "orderByAsc": False,
    }
    text = json.dumps(state)
    if text != before:
        client.set_experiment_tag(experiment_id, VIEW_TAG, text)


def _columns(text: str | None) -> Sequence[str]:
    """Return the scores that a view shows; none of one that a person put in its place in another form."""
    try:
        found = json.loads(text or "{}")["selectedColumns"]
    except (ValueError, KeyError, TypeError):
        return ()
    return [name for name in found if name not in (*_ATTRIBUTES, *_FIRST)]
