"""What a run says while it goes on: to MLflow, to Prefect's pages and events, and to whoever watches."""

from __future__ import annotations

from collections.abc import Sequence

from configs.errors import TrackingError
from flows.artifacts import (
    EpochTable,
    Progress,
    announce,
    evaluation_images,
    evaluation_table,
    evaluation_texts_table,
    report_link,
    tracking_link,
)
from flows.server import has_lasting_api
from tasks.metrics.alerts import Alert, Watcher
from tasks.metrics.evaluations import evaluation_figures, evaluation_grids, evaluation_texts
from tasks.metrics.reward_tables import earned
from tasks.metrics.speed import waited_in_words
from tasks.reports.report import run_report
from tasks.runs.context import RunContext
from tasks.tracking.reports import log_report
from tasks.tracking.tracker import Tracker


class RunCallbacks:
    """Tells of what was committed; nothing here decides anything."""

    def __init__(self, context: RunContext, tracker: Tracker) -> None:
        """Bind to a run and to its MLflow run."""
        self._context, self._tracker = context, tracker
        self._run, self._epochs = context.run.name, context.config.run.epochs
        self._times = context.ledger.times("optimize")
        self._watcher = Watcher(context.chain)
        self._progress, self._table = Progress(), EpochTable(context.run.name, context.chain)

    def evaluated(self, epoch: int) -> None:
        """Show the figures of an evaluation; with the first, where they are tracked."""
        chain = self._context.chain
        self._tracker.log_evaluation(epoch)
        evaluation_table(self._run, epoch, evaluation_figures(chain, epoch))
        evaluation_images(self._run, epoch, evaluation_grids(chain, epoch))
        evaluation_texts_table(self._run, epoch, evaluation_texts(chain, epoch))
        self._warn(self._watcher.evaluated(epoch))
        if epoch == 0:
            tracking_link(self._run, self._context.store.root.uri, self._tracker.url())

    def trained(self, epoch: int) -> None:
        """Log an epoch, and warn of alerts that begin with it."""
        self._tracker.log_epoch(epoch)
        self._warn(self._watcher.trained(epoch))

    def _warn(self, alerts: Sequence[Alert]) -> None:
        """Print alerts where they begin, and emit an event of each for automations."""
        for alert in alerts:
            self._context.reporter.message(f"warning: {alert.text}")
            announce("alert", self._run, rule=alert.rule, subject=alert.subject, epoch=alert.epoch, text=alert.text)
            if alert.rule == "monitor":
                announce("suspicion", self._run, monitor=alert.subject, epoch=alert.epoch, text=alert.text)

    def ended(self, epoch: int) -> None:
        """Say how far the run is."""
        self._progress.update(epoch, self._epochs)
        self._table.update(epoch, last=epoch == self._epochs)
        said, times = earned(self._context.chain, epoch), self._context.ledger.times("optimize")
        how, self._times = "pipeline" if times > self._times else "found", times
        waited = waited_in_words(self._context.ledger.waited_share())
        self._context.reporter.progress(how, epoch, epoch, self._epochs, f"{said}{waited}")

    def exported(self, epoch: int) -> None:
        """Register the exported model."""
        self._tracker.log_export(epoch)
        announce("exported", self._run, epoch=epoch)

    def report(self) -> None:
        """Log the run's report, if it is to have one, and show where it is."""
        wanted = self._context.config.tracking.report
        if has_lasting_api() if wanted is None else wanted:
            try:
                log_report(self._context, run_report(self._context))
            except TrackingError as error:
                self._context.reporter.message(str(error))
                return
            report_link(self._run, self._context.store.root.uri, self._tracker.url())
