"""MLflow: the only file that imports it.

Everything is logged from committed artifacts, in a background thread, and only what the MLflow run does not have yet:
a killed run continues its own curves without a gap or a double point. An unreachable tracker never stops training; it
says so once, and the next ``flowmill run`` logs what is missing.

Steps: ``optimize/*`` are logged at the optimizer update, everything else at the epoch.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from configs.load import dump_yaml, flatten
from storage.layout import ArtifactRef
from storage.lineage import LineageEntry
from storage.records import Manifest
from tasks.workspace import Workspace

if TYPE_CHECKING:
    from mlflow import MlflowClient

NOTE = "tracking"
_EPOCH_DONE = "epoch"
_MAX_PARAM = 500


def tracking_uri(root: str, configured: str | None) -> str:
    """Return the configured tracking URI, or that of the SQLite file in ``tracking_folder``."""
    return configured or f"sqlite:///{tracking_folder(root) / 'mlflow.db'}"


def tracking_folder(root: str) -> Path:
    """Return where MLflow's files are when no tracking URI is configured.

    That is the store itself, or ./flowmill-tracking for a store that is not a local folder.
    """
    return Path.cwd() / "flowmill-tracking" if "://" in root else Path(root)


class Tracker:
    """Logs one run to MLflow from a background thread."""

    def __init__(self, workspace: Workspace, *, orchestrator: Mapping[str, str]) -> None:
        """Start the thread; nothing is imported or connected in the caller's.

        Args:
            workspace: the run.
            orchestrator: tags that link to the orchestrator's run, such as its id and URL.
        """
        self.workspace = workspace
        self.uri = tracking_uri(workspace.store.root.uri, workspace.config.tracking.uri)
        self.failure: str | None = None
        self.seconds = 0.0
        self.run_id: str | None = None
        self.experiment_id: str | None = None
        self._started = threading.Event()
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="tracking", daemon=True)
        self._thread.start()
        self._jobs.put(lambda: self._start(orchestrator))

    def log_epoch(self, epoch: int) -> None:
        """Log rewards, advantages, optimizer updates, times and input digests of a finished epoch."""
        self._jobs.put(lambda: self._log_epoch(epoch))

    def log_evaluation(self, epoch: int) -> None:
        """Log the figures and image grids of an evaluation."""
        self._jobs.put(lambda: self._log_evaluation(epoch))

    def log_export(self, epoch: int, folder: Path) -> None:
        """Register the exported model; it becomes champion if its held-out reward is the best so far."""
        self._jobs.put(lambda: self._register(epoch, folder))

    def url(self, timeout: float = 60.0) -> str | None:
        """Return where the run is in the MLflow UI: a URL for a server, a path below the UI otherwise."""
        if not self._started.wait(timeout) or self.run_id is None:
            return None
        path = f"/#/experiments/{self.experiment_id}/runs/{self.run_id}"
        return f"{self.uri.rstrip('/')}{path}" if self.uri.startswith("http") else path

    def close(self, status: str) -> str | None:
        """Log what is queued, end the MLflow run with a status, and return what went wrong, if anything did."""
        self._jobs.put(lambda: self._client().set_terminated(str(self.run_id), status))
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
            except Exception as error:  # noqa: BLE001 - a tracker outage must not stop training; it is reported
                self.failure = f"{type(error).__name__}: {error}"
                self.workspace.reporter.message(
                    f"MLflow at {self.uri} failed ({self.failure}). Training goes on; run the same command again "
                    "later to log what is missing."
                )
                self._started.set()
            self.seconds += time.monotonic() - begun

    def _client(self) -> MlflowClient:
        from mlflow import MlflowClient

        return MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)

    def _start(self, orchestrator: Mapping[str, str]) -> None:
        import mlflow

        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        # models:/ addresses are looked up at the process's tracking server, whatever the client's is.
        mlflow.set_tracking_uri(self.uri)
        client = self._client()
        note = self.workspace.run.read_note(NOTE)
        if note is None:
            self.experiment_id = _experiment(client, self.workspace)
            run = client.create_run(self.experiment_id, run_name=self.workspace.run.name)
            self.workspace.run.note(NOTE, {"mlflow_run_id": run.info.run_id, "experiment_id": self.experiment_id})
            note = self.workspace.run.read_note(NOTE) or {}
        self.run_id, self.experiment_id = note["mlflow_run_id"], note["experiment_id"]
        client.update_run(self.run_id, status="RUNNING")
        _describe(client, self.run_id, self.workspace, orchestrator)
        self._started.set()
        self._catch_up()

    def _catch_up(self) -> None:
        """Log epochs and evaluations that were committed but not logged, after a kill or an outage."""
        entries = self.workspace.run.current()
        for epoch in sorted({e.epoch for e in entries if e.stage == "evaluate"}):
            self._log_evaluation(epoch)
        for epoch in sorted({e.epoch for e in entries if e.stage == "optimize"}):
            self._log_epoch(epoch)

    def _has(self, key: str, step: int) -> bool:
        history = self._client().get_metric_history(str(self.run_id), key)
        return any(metric.step == step for metric in history)

    def _log_epoch(self, epoch: int) -> None:
        if self._has(_EPOCH_DONE, epoch):
            return
        made = {(e.stage, e.slot): e for e in self.workspace.run.current() if e.epoch == epoch}
        manifests = {key: self.workspace.store.require(entry.ref) for key, entry in made.items() if key[0] in _LOGGED}
        figures = _epoch_figures(self.workspace, manifests)
        metrics = [_metric(key, value, epoch) for key, value in figures.items()]
        optimize = manifests.get(("optimize", ""))
        for update in optimize.summary["updates"] if optimize else []:
            step = int(update["update"])
            metrics += [_metric(f"optimize/{k}", v, step) for k, v in update.items() if k != "update"]
        self._inputs([(made[key], manifest) for key, manifest in manifests.items() if key[0] != "optimize"])
        # The marker travels in the same call as the figures: an epoch is logged in whole or not at all.
        self._batches([*metrics, _metric(_EPOCH_DONE, epoch, epoch)])

    def _batches(self, metrics: Sequence[Any]) -> None:
        for start in range(0, len(metrics), 1000):
            self._client().log_batch(str(self.run_id), metrics=list(metrics[start : start + 1000]))

    def _inputs(self, made: Sequence[tuple[LineageEntry, Manifest]]) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        inputs = []
        for entry, manifest in made:
            source = json.dumps({"root": self.workspace.store.root.uri, "artifact": entry.artifact})
            name = f"{entry.stage}-{entry.epoch:05d}{'-' + entry.slot if entry.slot else ''}"
            dataset = Dataset(name=name, digest=manifest.digest[:32], source_type="flowmill", source=source)
            inputs.append(DatasetInput(dataset, [InputTag("mlflow.data.context", entry.stage)]))
        if inputs:
            self._client().log_inputs(str(self.run_id), inputs)

    def _log_evaluation(self, epoch: int) -> None:
        entry = self.workspace.run.require(epoch, "evaluate")
        manifest = self.workspace.store.require(entry.ref)
        figures = {
            f"eval/{split}/{slot}_{figure}": value
            for split, rewards in manifest.summary.items()
            for slot, values in rewards.items()
            for figure, value in values.items()
        }
        figures["time/evaluate_s"] = _seconds(self.workspace, entry.ref)
        if self._has(sorted(figures)[0], epoch):
            return
        if epoch == 0:
            once = [e for e in self.workspace.run.current() if e.stage in ("base", "preprocess")]
            self._inputs([(e, self.workspace.store.require(e.ref)) for e in once])
        for split, path in grids(self.workspace, entry.ref).items():
            with Image.open(path) as image:
                self._client().log_image(str(self.run_id), image.convert("RGB"), key=f"eval/{split}", step=epoch)
            clips = path.parent / "clips"
            if clips.exists():
                target = f"eval/{split}/clips/epoch_{epoch:05d}"
                self._client().log_artifacts(str(self.run_id), str(clips), target)
        self._batches([_metric(key, value, epoch) for key, value in figures.items()])

    def _register(self, epoch: int, folder: Path) -> None:
        client, config = self._client(), self.workspace.config
        name = config.tracking.registered_model or f"flowmill-{self.workspace.run.name}"
        digest = self.workspace.store.require(self.workspace.run.require(epoch, "export").ref).digest
        _ensure_model(client, name)
        versions = client.search_model_versions(f"name = '{name}'")
        version = next((v for v in versions if v.tags.get("flowmill.digest") == digest), None)
        if version is None:
            version = self._new_version(client, name, epoch, folder, digest)
        score = heldout_reward(self.workspace, epoch)
        client.set_model_version_tag(name, version.version, "flowmill.heldout_reward", repr(score))
        if _beats_champion(client, name, score):
            client.set_registered_model_alias(name, "champion", version.version)

    def _new_version(self, client: MlflowClient, name: str, epoch: int, folder: Path, digest: str) -> Any:
        kind = "lora" if self.workspace.config.model.lora else "full"
        model = client.create_logged_model(
            str(self.experiment_id), name=name, source_run_id=self.run_id, params={"trained": kind}, model_type=kind
        )
        client.log_model_artifacts(model.model_id, str(folder))
        client.finalize_logged_model(model.model_id, "READY")
        tags = {"flowmill.digest": digest, "flowmill.epoch": str(epoch), "flowmill.run": self.workspace.run.name}
        return client.create_model_version(
            name, source=f"models:/{model.model_id}", run_id=self.run_id, model_id=model.model_id, tags=tags
        )


_LOGGED = ("rollout", "score", "advantage", "optimize")


def grids(workspace: Workspace, ref: ArtifactRef) -> dict[str, Path]:
    """Return the image grid of each split of an evaluation."""
    folders = {record.shard: workspace.store.folder(ref, record) for record in workspace.store.shards(ref)}
    return {split: folder / "grid.png" for split, folder in folders.items() if (folder / "grid.png").exists()}


def heldout_reward(workspace: Workspace, epoch: int) -> float:
    """Return the weighted held-out reward of an epoch's evaluation; that of the train prompts without held-out ones."""
    manifest = workspace.store.require(workspace.run.require(epoch, "evaluate").ref)
    figures = manifest.summary.get("heldout") or manifest.summary["train"]
    return float(sum(section.weight * figures[section.slot]["mean"] for section in workspace.config.rewards))


def _experiment(client: MlflowClient, workspace: Workspace) -> str:
    name = workspace.config.tracking.experiment
    found = client.get_experiment_by_name(name)
    if found is not None:
        return str(found.experiment_id)
    local = workspace.config.tracking.uri is None
    location = (tracking_folder(workspace.store.root.uri) / "mlflow-artifacts").as_uri() if local else None
    return str(client.create_experiment(name, artifact_location=location))


def _describe(client: MlflowClient, run_id: str, workspace: Workspace, orchestrator: Mapping[str, str]) -> None:
    """Log params and the resolved config once, and link to the orchestrator's run."""
    from mlflow.entities import Param, RunTag

    tags = {"flowmill.run": workspace.run.name, "flowmill.root": workspace.store.root.uri, **orchestrator}
    commit = _git_commit()
    if commit:
        tags["mlflow.source.git.commit"] = commit
    url = orchestrator.get("prefect.flow_run_url")
    # Only the description renders links.
    flow_run = f"Prefect flow run {orchestrator.get('prefect.flow_run_id')}"
    tags["mlflow.note.content"] = f"[{flow_run}]({url})" if url else f"{flow_run}; `flowmill ui` shows it."
    client.log_batch(run_id, tags=[RunTag(key, value) for key, value in tags.items()])
    if client.get_run(run_id).data.params:
        return
    flat = flatten(workspace.config.model_dump(mode="json"))
    params = [Param(key, str(value)[:_MAX_PARAM]) for key, value in sorted(flat.items())]
    for start in range(0, len(params), 100):
        client.log_batch(run_id, params=params[start : start + 100])
    client.log_text(run_id, dump_yaml(workspace.config), "config.yaml")


def _epoch_figures(workspace: Workspace, manifests: Mapping[tuple[str, str], Manifest]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for (stage, slot), manifest in manifests.items():
        ref = ArtifactRef(manifest.kind, manifest.id)
        key = f"time/{stage}_s"
        figures[key] = figures.get(key, 0.0) + _seconds(workspace, ref)
        if stage == "score":
            figures.update({f"reward/{slot}_{name}": value for name, value in manifest.summary.items()})
        if stage == "advantage":
            figures.update(_advantage_figures(manifest.summary))
    return figures


def _advantage_figures(summary: Mapping[str, float]) -> dict[str, float]:
    names = {"reward_mean": "reward/mean", "reward_std": "reward/std"}
    return {names.get(name, f"advantage/{name}"): value for name, value in summary.items()}


def _seconds(workspace: Workspace, ref: ArtifactRef) -> float:
    return sum(float(record.producer.get("seconds", 0.0)) for record in workspace.store.records(ref))


def _metric(key: str, value: float, step: int) -> Any:
    from mlflow.entities import Metric

    return Metric(key, float(value), int(time.time() * 1000), step)


def _ensure_model(client: MlflowClient, name: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def _beats_champion(client: MlflowClient, name: str, score: float) -> bool:
    from mlflow.exceptions import MlflowException

    try:
        champion = client.get_model_version_by_alias(name, "champion")
    except MlflowException:
        return True
    return score > float(champion.tags.get("flowmill.heldout_reward", "-inf"))


def _git_commit() -> str | None:
    """Return the commit of the working directory, or None outside a repository."""
    if "GIT_COMMIT" in os.environ:
        return os.environ["GIT_COMMIT"]
    try:
        result = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()
