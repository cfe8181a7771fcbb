"""Tracking against a real MLflow store on SQLite."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from configs.schema import RunConfig
from tasks.export import ExportStage, exported_folder
from tasks.stage import StageRun
from tasks.stages import make_stage
from tasks.tracking import Tracker, heldout_reward
from tasks.workspace import Workspace
from tests.conftest import prepare, run_epoch

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
Make = Callable[..., RunConfig]
LINKS = {"prefect.flow_run_id": "f-1", "prefect.flow_run_url": "http://127.0.0.1:4200/runs/flow-run/f-1"}


def evaluated(workspace: Workspace, epoch: int) -> None:
    StageRun(make_stage(workspace, "evaluate", epoch)).execute()


def client_of(workspace: Workspace) -> tuple[MlflowClient, Any]:
    client = MlflowClient(f"sqlite:///{Path(workspace.store.root.uri) / 'mlflow.db'}")
    note = workspace.run.read_note("tracking")
    assert note is not None
    return client, client.get_run(note["mlflow_run_id"])


def steps(client: MlflowClient, run: Any, key: str) -> list[int]:
    return sorted(metric.step for metric in client.get_metric_history(run.info.run_id, key))


def test_a_run_in_mlflow(make_config: Make) -> None:
    workspace = prepare(make_config())
    evaluated(workspace, 0)
    tracker = Tracker(workspace, orchestrator=LINKS)
    tracker.log_evaluation(0)
    run_epoch(workspace, 1)
    tracker.log_epoch(1)
    evaluated(workspace, 1)
    tracker.log_evaluation(1)
    stage = ExportStage(workspace, 1)
    StageRun(stage).execute()
    tracker.log_export(1, exported_folder(stage))
    url = tracker.url()
    assert tracker.close("FINISHED") is None

    client, run = client_of(workspace)
    assert run.info.status == "FINISHED"
    assert url is not None
    assert url.endswith(f"/runs/{run.info.run_id}")
    assert run.data.params["optimize.learning_rate"] == "0.001"
    assert run.data.tags["prefect.flow_run_id"] == "f-1"
    assert LINKS["prefect.flow_run_url"] in run.data.tags["mlflow.note.content"]
    assert len(run.data.tags["mlflow.source.git.commit"]) == 40
    expected = {
        *("reward/mean", "reward/std", "reward/jpeg_compressibility_mean"),
        *("advantage/zero_std_ratio", "advantage/group_std"),
        *("optimize/loss", "optimize/ratio_mean", "optimize/ratio_std", "optimize/clip_high", "optimize/clip_low"),
        *("optimize/approx_kl", "optimize/grad_norm"),
        *("eval/train/jpeg_compressibility_mean", "eval/heldout/jpeg_compressibility_exact"),
        *(f"time/{name}_s" for name in ("rollout", "score", "advantage", "optimize", "evaluate")),
    }
    assert expected <= set(run.data.metrics)
    assert steps(client, run, "optimize/loss") == [1, 2]
    assert steps(client, run, "eval/train/jpeg_compressibility_mean") == [0, 1]
    contexts = {tag.value for item in run.inputs.dataset_inputs for tag in item.tags}
    assert contexts == {"base", "preprocess", "rollout", "score", "advantage"}
    manifest = workspace.store.require(workspace.run.require(1, "rollout").ref)
    assert manifest.digest[:32] in {item.dataset.digest for item in run.inputs.dataset_inputs}
    images = [artifact.path for artifact in client.list_artifacts(run.info.run_id, "images")]
    assert len([path for path in images if path.endswith(".png")]) == 4
    champion = client.get_model_version_by_alias("flowmill-small", "champion")
    assert float(champion.tags["flowmill.heldout_reward"]) == heldout_reward(workspace, 1)


def test_a_killed_run_continues_its_curves_without_gap_or_double_point(make_config: Make) -> None:
    workspace = prepare(make_config())
    evaluated(workspace, 0)
    run_epoch(workspace, 1)
    first = Tracker(workspace, orchestrator=LINKS)
    first.log_epoch(1)
    first.close("KILLED")
    run_epoch(workspace, 2)  # committed, never logged: as after a kill
    second = Tracker(workspace, orchestrator={})
    second.log_epoch(1)
    second.log_epoch(2)
    assert second.close("FINISHED") is None
    client, run = client_of(workspace)
    assert steps(client, run, "reward/mean") == [1, 2]
    assert steps(client, run, "optimize/loss") == [1, 2, 3, 4]
    assert steps(client, run, "eval/train/jpeg_compressibility_mean") == [0]
    assert run.info.status == "FINISHED"


def test_the_champion_moves_only_when_the_heldout_reward_improves(
    make_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tasks.tracking

    scores = {1: 0.5, 2: 0.4, 3: 0.6}
    monkeypatch.setattr(tasks.tracking, "heldout_reward", lambda workspace, epoch: scores[epoch])
    workspace = prepare(make_config("run.epochs=3"))
    tracker = Tracker(workspace, orchestrator={})
    champions = []
    for epoch in (1, 2, 3):
        run_epoch(workspace, epoch)
        stage = ExportStage(workspace, epoch)
        StageRun(stage).execute()
        tracker.log_export(epoch, exported_folder(stage))
        tracker._jobs.put(lambda: champions.append(_champion(tracker)))
    assert tracker.close("FINISHED") is None
    assert champions == ["1", "1", "3"]


def _champion(tracker: Tracker) -> str:
    return str(tracker._client().get_model_version_by_alias("flowmill-small", "champion").version)


def test_an_outage_is_told_and_does_not_stop_training(make_config: Make) -> None:
    workspace = prepare(make_config("tracking.uri=http://127.0.0.1:9"))
    told: list[str] = []
    workspace.reporter.message = told.append  # type: ignore[method-assign]
    import os

    os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
    try:
        tracker = Tracker(workspace, orchestrator={})
        run_epoch(workspace, 1)
        tracker.log_epoch(1)
        assert "9" in str(tracker.close("FINISHED"))
    finally:
        del os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"]
    assert any("Training goes on" in text for text in told)
