"""Sweeps in MLflow: one parent run for the runs of all variants.

An unreachable tracker never stops a sweep: one message reports it, and the same command later logs the missing data.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from flowmill.configs.escaping import in_cell
from flowmill.storage.artifacts.lineage import RunFolder
from flowmill.tasks.metrics.sweep import Outcome
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runtime.background import in_background
from flowmill.tasks.tracking.client import first_line, open_client
from flowmill.tasks.tracking.descriptions import experiment
from flowmill.tasks.tracking.locations import REPORT, tracking_uri
from flowmill.tasks.tracking.names import mlflow_name

_SWEEP = "flowmill.sweep"
#: Series of records of a run: the MLflow run of its sweep.
_RECORD = "sweep"
#: The table of variants, best first.
TABLE = "variants.csv"
#: Seconds to wait for the tracker each time, for an upload of the report, and after a failure; MLflow itself tries for
#: minutes.
_PATIENCE_S, _UPLOAD_S, _LAST_TRY_S = 60.0, 600.0, 5.0


class SweepRun:
    """The MLflow run of a sweep; the existing one below which the sweep's runs are is continued."""

    def __init__(
        self, context: RunContext, name: str, variants: Iterable[str], *, say: Callable[[str], None] | None = None
    ) -> None:
        """Find or create the MLflow run.

        Args:
            context: the context of one of the sweep's runs; all have the same tracker.
            name: name of the sweep.
            variants: names of all its runs.
            say: reports a failure of the tracker, after which no table and report are logged.
        """
        self.run_id: str | None = None
        """Id of the MLflow run; None without one."""
        self.failure: str | None = None
        self._context, self._name, self._say = context, name, say or context.reporter.message
        # On a shared server another store may have a sweep of this name.
        runs = [RunFolder(context.store, each) for each in variants]
        own = {((each.config() or {}).get("tracking") or {}).get("parent") for each in runs}
        # Configs have the id once their variants begin; a sweep may be killed before.
        own |= {(each.newest(_RECORD) or {}).get("mlflow_run_id") for each in runs}
        self._try(lambda: self._open(own), _PATIENCE_S)

    def log(self, outcomes: Sequence[Outcome], report: str | None) -> None:
        """Log the table and the report."""
        texts = {TABLE: _table(outcomes)} | ({} if report is None else {REPORT: report})
        if self.failure is None:
            self._try(lambda: self._log(texts), _UPLOAD_S)

    def end(self, status: str) -> None:
        """End the run, also after a failure, with a status of MLflow: FINISHED, FAILED or KILLED."""
        if (run_id := self.run_id) is not None:
            # After a failure the tracker is probably still away, and Ctrl-C should end the command.
            patience = _PATIENCE_S if self.failure is None else _LAST_TRY_S
            self._try(lambda: self._client.set_terminated(run_id, status), patience)

    def _open(self, own: Collection[str | None]) -> None:
        self._client = open_client(self._context.store.root.uri, self._context.config.tracking.uri)
        where = experiment(self._client, self._context)
        runs = self._client.search_runs([where], filter_string=f"tags.`{_SWEEP}` = '{self._name}'")
        run = next((each for each in runs if each.info.run_id in own), None)
        # An answer that comes too late must not leave a run that nothing ends.
        if self.failure is not None:
            return
        if run is None:
            run = self._client.create_run(where, run_name=mlflow_name("run", self._name), tags={_SWEEP: self._name})
        self.run_id = str(run.info.run_id)
        self._context.run.add(_RECORD, {"mlflow_run_id": self.run_id})
        self._client.update_run(self.run_id, status="RUNNING")

    def _log(self, texts: Mapping[str, str]) -> None:
        for name, text in texts.items():
            self._client.log_text(str(self.run_id), text, name)

    def _try(self, job: Callable[[], None], seconds: float) -> None:
        """Do a job and wait for it; report the first failure."""
        before = self.failure
        try:
            in_background(job, "tracking").result(seconds)
        except TimeoutError as error:
            self.failure = first_line(error) or f"no answer within {seconds:g} s"
        except Exception as error:  # noqa: BLE001 - a tracker outage must not stop a sweep; it is reported
            self.failure = f"{type(error).__name__}: {first_line(error)}"
        if before is None and self.failure is not None:
            uri = tracking_uri(self._context.store.root.uri, self._context.config.tracking.uri)
            self._say(
                f"MLflow at {uri} failed ({self.failure}). The sweep continues; the same command later logs its parent "
                "run, with table and report."
            )


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
