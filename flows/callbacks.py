"""Reports the progress of a run to MLflow, to Prefect's UI and events, and to the terminal or log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flowmill.configs.errors import FlowmillError, StoppedError, TrackingError
from flowmill.configs.escaping import command
from flowmill.configs.roots import root_option
from flowmill.flows import process_state
from flowmill.flows.artifacts import Progress, announce, report_link, tracking_link
from flowmill.flows.cancellation import was_stopped
from flowmill.flows.server import has_lasting_api
from flowmill.tasks.metrics.alerts import Alert, Watcher
from flowmill.tasks.metrics.reward_tables import earned
from flowmill.tasks.metrics.speed import waited_in_words
from flowmill.tasks.metrics.view import RunView
from flowmill.tasks.reports.report import run_report
from flowmill.tasks.reports.sample_lines import sample_lines
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.tracking.reports import log_report
from flowmill.tasks.tracking.tracker import Tracker


class RunCallbacks:
    """Reports committed work; stops the run only where an alert is to stop it."""

    def __init__(self, context: RunContext, tracker: Tracker, *, show: int = 0) -> None:
        """Bind to a run and to its MLflow run; ``show`` is the number of samples of each evaluation to report."""
        self._context, self._tracker, self._show = context, tracker, show
        self._run, self._epochs = context.run.name, context.config.run.epochs
        self._times = context.ledger.times("optimize")
        self._watcher = Watcher(context.chain)
        self._progress = Progress()

    def evaluated(self, epoch: int) -> None:
        """Log an evaluation, and report alerts that begin with it; the first also shows the link to the tracker."""
        self._tracker.log_evaluation(epoch)
        for line in sample_lines(RunView(self._context), epoch, self._show) if self._show else ():
            self._context.reporter.message(line)
        self._warn(self._watcher.evaluated(epoch))
        if epoch == 0:
            tracking_link(self._run, self._context.store.root.uri, self._tracker.url())

    def trained(self, epoch: int) -> None:
        """Log an epoch, and report alerts that begin with it."""
        self._tracker.log_epoch(epoch)
        self._warn(self._watcher.trained(epoch))

    def _warn(self, alerts: Sequence[Alert]) -> None:
        if alerts:
            self._tracker.log_alerts()
        for alert in alerts:
            self._context.reporter.message(f"warning: {alert.text}")
            facts: dict[str, Any] = {"epoch": alert.epoch, "text": alert.text}
            announce("alert", self._context.run, rule=alert.rule, subject=alert.subject, **facts)
            if alert.rule == "monitor":
                announce("suspicion", self._context.run, monitor=alert.subject, **facts)
        config = self._context.config
        stops = [alert for alert in alerts if config.watch.on.get(alert.rule) == "stop"]
        if stops:
            raise StoppedError(
                f"Run '{self._run}' ends here, as watch.on.{stops[0].rule} says: {stops[0].text} Everything up to here "
                f"is committed. To continue, set watch.on.{stops[0].rule} to 'warn'."
            )

    def ended(self, epoch: int) -> None:
        """Report the progress of the run."""
        self._progress.update(epoch, self._epochs)
        rewards, times = earned(self._context.chain, epoch), self._context.ledger.times("optimize")
        how, self._times = "pipeline" if times > self._times else "found", times
        waited = waited_in_words(self._context.ledger.waited_share())
        self._context.reporter.progress(how, epoch, epoch, self._epochs, f"{rewards}{waited}")

    def exported(self, epoch: int, artifact: str) -> None:
        """Register and announce the exported model."""
        self._tracker.log_export(epoch)
        announce("exported", self._context.run, artifact=artifact, epoch=epoch)

    def report(self) -> None:
        """Log the run's report, if the config enables it, and show its location."""
        enabled = self._context.config.tracking.report
        if has_lasting_api() if enabled is None else enabled:
            html = report_of(self._context)
            if html is None:
                return
            try:
                log_report(self._context, html)
            except TrackingError as error:
                self._context.reporter.message(str(error))
                return
            report_link(self._run, self._context.store.root.uri, self._tracker.url())


def report_of(*contexts: RunContext) -> str | None:
    """Return the report of finished runs; None after a message if it cannot be drawn: the runs stay finished."""
    try:
        return run_report(*contexts)
    except Exception as error:
        if was_stopped(error):
            raise
        how = command(
            "flowmill", "report", *(each.run.name for each in contexts), *root_option(contexts[0].store.root.uri)
        )
        reason = str(error) if isinstance(error, FlowmillError) else f"{type(error).__name__}: {error}"
        process_state.reporter().message(
            f"Everything is committed, but its report could not be drawn ({reason}). Try again: {how}"
        )
        return None
