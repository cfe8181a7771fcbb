"""MLflow's list of runs, with their scores as columns."""

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
#: Columns that every run has.
_FIRST = (*(f"metrics.`{ACHIEVED}/{name}`" for name in ("heldout", "train", "rollout")), "params.`algorithm`")
#: Most columns of single rewards; more do not fit into a window.
_MOST = 4
#: Pixels per letter of a column's name, and for padding, so that the whole name is visible.
_LETTER, _PADDING = 7, 40


def show_scores(client: MlflowClient, experiment_id: str, made: EvaluationContent) -> None:
    """Add the scores of an evaluation to the columns of the experiment's list of runs."""
    tags = client.get_experiment(experiment_id).tags
    before = tags.get(VIEW_TAG)
    known = _columns(before)
    means = [mlflow_name("metric", point.key) for point in made.points if point.split and point.key.endswith("_mean")]
    # Scores on held-out prompts come first: they are more informative.
    scores = [f"metrics.`{key}`" for key in sorted(means, key=lambda key: "/heldout/" not in key)]
    shown = list(dict.fromkeys([*known, *scores]))[:_MOST]
    state = {
        "selectedColumns": [*_ATTRIBUTES, *_FIRST, *shown],
        "columnOrder": [*_ATTRIBUTES, *_FIRST, *shown],
        "columnWidths": {name: _LETTER * len(name.split("`")[1]) + _PADDING for name in (*_FIRST, *shown)},
        "orderByKey": "attributes.start_time",
        "orderByAsc": False,
    }
    text = json.dumps(state)
    if text != before:
        client.set_experiment_tag(experiment_id, VIEW_TAG, text)


def _columns(text: str | None) -> Sequence[str]:
    """Return the score columns of a view; none if a user replaced it by another format."""
    try:
        found = json.loads(text or "{}")["selectedColumns"]
    except (ValueError, KeyError, TypeError):
        return ()
    return [name for name in found if name not in (*_ATTRIBUTES, *_FIRST)]
