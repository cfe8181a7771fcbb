"""Sweeps in MLflow: one parent run for the runs of all variants."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence

from mlflow import MlflowClient

from flowmill.configs.escaping import in_cell
from flowmill.storage.artifacts.lineage import RunFolder
from flowmill.tasks.metrics.sweep import Outcome
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.tracking.client import open_client, reaching
from flowmill.tasks.tracking.descriptions import experiment
from flowmill.tasks.tracking.locations import REPORT, tracking_uri
from flowmill.tasks.tracking.names import mlflow_name

_SWEEP = "flowmill.sweep"
#: The table of variants, best first.
TABLE = "variants.csv"


class SweepRun:
    """The MLflow run of a sweep; the existing one below which the sweep's runs are is continued."""

    def __init__(self, context: RunContext, name: str, variants: Iterable[str]) -> None:
        """Find or create the MLflow run.

        Args:
            context: the context of one of the sweep's runs; all have the same tracker.
            name: name of the sweep.
            variants: names of all its runs.
        """
        # On a shared server another store may have a sweep of this name.
        configs = (RunFolder(context.store, each).config() or {} for each in variants)
        own = {(config.get("tracking") or {}).get("parent") for config in configs}
        self._uri = tracking_uri(context.store.root.uri, context.config.tracking.uri)
        with reaching(self._uri, "The sweep"):
            self._client: MlflowClient = open_client(context.store.root.uri, context.config.tracking.uri)
            where = experiment(self._client, context)
            runs = self._client.search_runs([where], filter_string=f"tags.`{_SWEEP}` = '{name}'")
            run = next((each for each in runs if each.info.run_id in own), None)
            if run is None:
                run = self._client.create_run(where, run_name=mlflow_name("run", name), tags={_SWEEP: name})
            self.run_id = str(run.info.run_id)
            self._client.update_run(self.run_id, status="RUNNING")

    def log(self, outcomes: Sequence[Outcome], report: str | None) -> None:
        """Log the table and the report."""
        with reaching(self._uri, "The sweep"):
            self._client.log_text(self.run_id, _table(outcomes), TABLE)
            if report is not None:
                self._client.log_text(self.run_id, report, REPORT)

    def end(self, status: str) -> None:
        """End the run with a status of MLflow: FINISHED, FAILED or KILLED."""
        with reaching(self._uri, "The sweep"):
            self._client.set_terminated(self.run_id, status)


def _table(outcomes: Sequence[Outcome]) -> str:
    keys = list(dict.fromkeys(key for each in outcomes for key in each.variant.settings))
    figures = list(dict.fromkeys(name for each in outcomes for name in each.figures))
    text = io.StringIO()
    table = csv.writer(text)
    final = list(dict.fromkeys(name for each in outcomes for name in each.final))
    table.writerow(map(in_cell, ["run", *keys, "epoch", "reward", *figures, *(f"final {name}" for name in final)]))
    for each in outcomes:
        settings = [each.variant.settings.get(key, "") for key in keys]
        scores = [each.figures.get(name, "") for name in figures] + [each.final.get(name, "") for name in final]
        table.writerow(map(in_cell, [each.variant.name, *settings, each.epoch, each.reward, *scores]))
    return text.getvalue()
