"""Logs a run to MLflow in a background thread: reads committed artifacts and logs only data that MLflow lacks.

A killed run continues its curves without gaps or duplicate points. A point has the time of the commit it is read from:
logged again, it is the same row of MLflow's database, which stores it once. Tags of the MLflow run list the logged
epochs and evaluations; they are written after the points. If a listed one no longer belongs to the run (an epoch was
repeated, the number of epochs was lowered), a new MLflow run starts, so no curve mixes two versions. The old MLflow run
goes to the trash, or is marked as superseded if models were registered from it. An unreachable tracker never stops
training: one message reports it, and the next ``flowmill run`` logs the missing data.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from flowmill.configs.errors import NotCommittedError
from flowmill.configs.escaping import command
from flowmill.configs.roots import root_option
from flowmill.tasks.inputs.weight_sources import exported_folder
from flowmill.tasks.metrics import tracked
from flowmill.tasks.metrics.alerts import TAG, alert_tag
from flowmill.tasks.metrics.evaluations import finished_evaluations, named_evaluations
from flowmill.tasks.metrics.sweep import sum_of_rewards
from flowmill.tasks.metrics.tracked import Content, EvaluationContent
from flowmill.tasks.runs.chain import Chain
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runs.staleness import is_complete
from flowmill.tasks.specs.graph import Node, policy_after
from flowmill.tasks.tracking.descriptions import PARENT, datasets, describe, description, experiment, with_link
from flowmill.tasks.tracking.locations import tracking_uri
from flowmill.tasks.tracking.logged import metric_of
from flowmill.tasks.tracking.names import epoch_digits, mlflow_name, mlflow_text
from flowmill.tasks.tracking.series import SERIES, recorded_runs

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from flowmill.tasks.tracking.models import Export, Owner

#: The UI hides tags with MLflow's own prefix.
_LOGGED = "mlflow.flowmill.logged"
#: Entries per tag; a tag's value is limited.
_PER_TAG = 200
#: Points per call: MLflow accepts 1000, and 1 MB.
_PER_CALL = 500


class Tracker:
    """Logs one run to MLflow from a background thread."""

    def __init__(
        self, context: RunContext, *, orchestrator: Mapping[str, str], attends: bool = True, series: str = SERIES
    ) -> None:
        """Start the thread; the caller's thread imports no MLflow and opens no connection.

        Args:
            orchestrator: tags that link to the orchestrator's run, such as its id and URL.
            attends: the run is being executed: set its state, record the machine's load, and start a new MLflow run if
                the old one does not fit. Otherwise, and for a complete run, only add new data to an MLflow run that
                fits.
            series: name of the run's records of its MLflow runs, one series per tracker.
        """
        self.context = context
        self.uri = tracking_uri(context.store.root.uri, context.config.tracking.uri)
        self.failure: str | None = None
        self.seconds = 0.0
        self.run_id: str | None = None
        self.experiment_id: str | None = None
        self._logged: dict[str, str] = {}
        self._unknown: set[str] = set()
        self._ended = False
        self._readable = True
        self._opened: MlflowClient | None = None
        self._monitor: Any = None
        self._attends = attends
        self._series = series
        self._orchestrator = dict(orchestrator)
        self._started = threading.Event()
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="tracking", daemon=True)
        self._thread.start()
        # Read committed artifacts here: the thread only talks to MLflow.
        current, complete = self._current(), is_complete(context.chain)
        self._jobs.put(lambda: self._start(current, complete=complete))

    def log_epoch(self, epoch: int) -> None:
        """Log rewards, advantages, optimizer updates and times of a finished epoch."""
        content = tracked.epoch_content(self.context.chain, epoch)
        if content is not None:
            self._jobs.put(lambda: self._log_epoch(content))

    def log_alerts(self) -> None:
        """Tag the run with all alerts so far, each once with the epoch where it begins."""
        value = alert_tag(self.context.chain)
        self._jobs.put(lambda: self._client.set_tag(str(self.run_id), TAG, mlflow_text(value)))

    def log_evaluation(self, epoch: int) -> None:
        """Log scores and image grids of an evaluation, and the policy as a logged model with these scores."""
        content = tracked.evaluation_content(self.context.chain, epoch)
        if content is not None:
            self._jobs.put(lambda: self._log_evaluation(content))

    def log_side_evaluations(self) -> None:
        """Log the additional evaluations, each under its own name."""
        for content in tracked.side_contents(self.context.chain):
            self._jobs.put(partial(self._log_evaluation, content))

    def log_export(self, epoch: int) -> None:
        """Register the model of an evaluated epoch; ``champion`` is the run's last model, or that of a better run."""
        from flowmill.tasks.tracking.models import Export

        chain = self.context.chain
        ref = chain.target(Node(epoch, "export"))
        export = Export(
            epoch=epoch,
            folder=exported_folder(self.context.store, ref),
            digest=self.context.store.require(ref).digest,
            policy=str(chain.ref(policy_after(self.context.config.run.epochs))),
        )
        content = tracked.evaluation_content(chain, epoch)
        if content is not None:
            self._jobs.put(lambda: self._register(export, content))

    def url(self, timeout: float = 60.0) -> str | None:
        """Return the run's address in the MLflow UI: a URL for a server, a path below the UI of the store's own
        database; None for another database, which 'flowmill ui' does not serve."""
        if not self._started.wait(timeout) or self.run_id is None:
            return None
        # Without the last part MLflow may open in the view of language model applications.
        path = f"/#/experiments/{self.experiment_id}/runs/{self.run_id}?workflowType=machine_learning"
        if self.uri.startswith("http"):
            return f"{self.uri.rstrip('/')}{path}"
        return path if self.uri == tracking_uri(self.context.store.root.uri, None) else None

    def close(self, status: str) -> str | None:
        """Finish queued jobs, end the MLflow run with a status, and return the failure, if any.

        A run that is 'RUNNING' is not ended.
        """
        text = description(self.context, done=True) if status == "FINISHED" else None
        self._jobs.put(lambda: self._end(status, text))
        self._jobs.put(None)
        self._thread.join()
        return self.failure

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self.failure is not None:
                continue
            begun = time.monotonic()
            try:
                job()
            except BaseException as error:  # noqa: BLE001 - a tracker outage must not stop training; it is reported
                self.failure = f"{type(error).__name__}: {error}".partition("\n")[0]
                how = command("flowmill", "track", self.context.run.name, *root_option(self.context.store.root.uri))
                self.context.reporter.message(
                    f"MLflow at {self.uri} failed ({self.failure}). The run continues; '{how}' or the next "
                    "'flowmill run' logs the missing data."
                )
                self._started.set()
            self.seconds += time.monotonic() - begun
        if self._monitor is not None:
            self._monitor.finish()

    @property
    def _client(self) -> MlflowClient:
        from flowmill.tasks.tracking.client import open_client

        if self._opened is None:
            self._opened = open_client(self.context.store.root.uri, self.context.config.tracking.uri)
        return self._opened

    def _current(self) -> list[Content]:
        chain = self.context.chain
        contents: list[Content | None] = []
        for key, read in self._readers(chain):
            try:
                contents.append(read())
            except NotCommittedError:
                # Lost and not computed again yet, or removed: its logged data stays.
                self._unknown.add(mlflow_name("entry", key))
        return [each for each in contents if each is not None]

    def _readers(self, chain: Chain) -> Iterator[tuple[str, Callable[[], Content | None]]]:
        """Yield a reader for each epoch and each evaluation, with its key in ``_logged``."""
        for epoch in range(1, self.context.config.run.epochs + 1):
            yield str(epoch), partial(tracked.epoch_content, chain, epoch)
        for epoch in finished_evaluations(chain):
            yield f"{epoch}:", partial(tracked.evaluation_content, chain, epoch)
        for epoch, name in named_evaluations(chain):
            yield f"{epoch}:{name}", partial(tracked.side_content, chain, epoch, name)

    def _start(self, current: Sequence[Content], *, complete: bool) -> None:
        self.experiment_id = experiment(self._client, self.context)
        earlier = self._earlier_run()
        now = {_key(content): content.identity for content in current}
        fits = self._readable and all(now.get(key) == self._logged[key] for key in {*self._logged} - self._unknown)
        if earlier is not None and fits:
            self.run_id = earlier
            # The run is complete: leave its MLflow state unchanged, including the end time.
            self._attends = self._attends and not (complete and self._ended)
        elif self._attends:
            self._begin_run(earlier)
        if self._attends:
            self._client.update_run(str(self.run_id), status="RUNNING")
            describe(self._client, str(self.run_id), self.context, self._orchestrator)
            self._start_monitor()
        elif self.run_id is not None and (parent := self.context.config.tracking.parent) is not None:
            # Where an outage ended before the run did, the parent run is younger than it.
            self._client.set_tag(self.run_id, PARENT, mlflow_text(parent))
        self._started.set()
        # MLflow's tables list metrics in the order of their first logging: evaluations first.
        ordered = sorted(current, key=lambda content: not isinstance(content, EvaluationContent))
        for content in ordered if self.run_id is not None else ():
            self._log_evaluation(content) if isinstance(content, EvaluationContent) else self._log_epoch(content)

    def _earlier_run(self) -> str | None:
        """Return the id of the existing MLflow run, if any, and read the list of its logged entries."""
        from mlflow.exceptions import MlflowException

        note = self.context.run.newest(self._series)
        try:
            run = None if note is None else self._client.get_run(str(note["mlflow_run_id"]))
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        if run is None or run.info.lifecycle_stage != "active" or run.info.experiment_id != self.experiment_id:
            return None
        # Without an orchestrator of its own the MLflow run keeps the link to that of the run.
        recorded = {key: value for key, value in run.data.tags.items() if key.startswith("prefect.")}
        self._orchestrator = self._orchestrator or recorded
        tags = sorted((key, value) for key, value in run.data.tags.items() if key.startswith(_LOGGED))
        try:
            parts = [json.loads(text) for _, text in tags]
        except ValueError:
            # MLflow truncated the tag: the logged entries are unknown.
            self._readable, parts = False, []
        self._logged = {mlflow_name("entry", key): value for part in parts for key, value in part.items()}
        self._ended = run.info.status == "FINISHED"
        return str(run.info.run_id)

    def _begin_run(self, old: str | None) -> None:
        from flowmill.tasks.tracking.models import put_away

        if old is not None:
            gone = put_away(self._client, str(self.experiment_id), old)
            where = "is in MLflow's trash" if gone else "stays for the models registered from it, as superseded"
            self.context.reporter.message(
                f"MLflow run {old} holds epochs that are not part of the run any more; it {where}, and the run is "
                "logged again."
            )
        self._logged = {}
        name = mlflow_name("run", self.context.run.name)
        self.run_id = self._client.create_run(str(self.experiment_id), run_name=name).info.run_id
        self.context.run.add(self._series, {"mlflow_run_id": self.run_id, "experiment_id": self.experiment_id})

    def _log_epoch(self, content: Content) -> None:
        if _key(content) not in self._logged:
            self._batch(content, [metric_of(point, content.time_ms) for point in content.points])

    def _log_evaluation(self, content: EvaluationContent) -> None:
        from flowmill.tasks.tracking.logged import log_picture, log_texts
        from flowmill.tasks.tracking.models import logged_model

        if _key(content) in self._logged:
            return
        prefix = f"eval-{content.name}" if content.name else "eval"
        for split, path in content.images.items():
            place = f"{prefix}/{split}"
            log_picture(self._client, str(self.run_id), path, key=place, step=content.epoch, time_ms=content.time_ms)
        for split, folder in content.clips:
            place = f"{mlflow_name('folder', f'{prefix}/{split}')}/clips/epoch_{epoch_digits(content.epoch)}"
            self._client.log_artifacts(str(self.run_id), str(folder), place)
        for split, texts in content.texts.items():
            log_texts(self._client, str(self.run_id), texts, place=f"{prefix}/{split}", epoch=content.epoch)
        model = None if content.name else logged_model(self._client, self._owner(), content).model_id
        sets = datasets(self.context)
        named = {point: sets[point.split] for point in content.points if point.split in sets}
        points = [metric_of(point, content.time_ms, model=model, dataset=named.get(point)) for point in content.points]
        # Last: entries noted as logged are skipped from now on.
        self._batch(content, points)

    def _batch(self, content: Content, metrics: Sequence[Any]) -> None:
        """Log points in chunks; the call with the last chunk also notes them as logged."""
        from mlflow.entities import RunTag

        self._logged[_key(content)] = content.identity
        position = list(self._logged).index(_key(content)) // _PER_TAG
        part = dict(list(self._logged.items())[position * _PER_TAG : (position + 1) * _PER_TAG])
        tag = RunTag(f"{_LOGGED}.{position:03d}", json.dumps(part))
        for start in range(0, max(1, len(metrics)), _PER_CALL):
            chunk, last = list(metrics[start : start + _PER_CALL]), start + _PER_CALL >= len(metrics)
            self._client.log_batch(str(self.run_id), metrics=chunk, tags=[tag] if last else [])

    def _register(self, export: Export, content: EvaluationContent) -> None:
        from flowmill.tasks.tracking.models import register

        name = self.context.config.tracking.registered_model or f"flowmill-{self.context.run.name}"
        name = mlflow_name("registered model", name)
        owner = replace(self._owner(), earlier=recorded_runs(self.context))
        if register(self._client, owner, name, content, export):
            self.context.reporter.message(
                f"The alias champion of '{name}' was at a version whose score is another sum of rewards, which does "
                f"not compare; it is at the best one of {owner.rewards} now."
            )

    def _owner(self) -> Owner:
        from flowmill.tasks.tracking.models import Owner

        return Owner(
            run=self.context.run.name,
            run_id=str(self.run_id),
            experiment_id=str(self.experiment_id),
            kind="lora" if self.context.config.model.lora else "full",
            rewards=sum_of_rewards(self.context.config),
        )

    def _end(self, status: str, text: str | None) -> None:
        if self._attends and text is not None:
            note = mlflow_text(with_link(text, self._orchestrator))
            self._client.set_tag(str(self.run_id), "mlflow.note.content", note)
        if self._attends and status != "RUNNING":
            self._client.set_terminated(str(self.run_id), status)

    def _start_monitor(self) -> None:
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        self._monitor = SystemMetricsMonitor(self.run_id, resume_logging=True, tracking_uri=self.uri)
        self._monitor.start()


def log_side_evaluations(context: RunContext) -> None:
    """Log additional evaluations to a run's existing MLflow run; do nothing for a run that was never tracked."""
    if context.run.newest(SERIES) is None or not tracked.side_contents(context.chain):
        return
    own = context.chain.own
    run = context if own is None else RunContext(context.store, own.config, context.run, reporter=context.reporter)
    Tracker(run, orchestrator={}, attends=False).close("FINISHED")


def _key(content: Content) -> str:
    return mlflow_name("entry", content.key)
