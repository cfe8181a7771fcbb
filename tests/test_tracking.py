"""Tracking against a real MLflow store on SQLite."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlflow
import pytest
from mlflow import MlflowClient
from PIL import Image

from configs.schema import RunConfig
from tasks.context import RunContext
from tasks.figures import evaluation_figures, weighted_reward
from tasks.runs import open_run
from tasks.stage import StageRun
from tasks.stages import make_stage
from tasks.tracking import content
from tasks.tracking.client import open_client
from tasks.tracking.tracker import Tracker
from tests.conftest import evaluated, prepare, run_epoch

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
Make = Callable[..., RunConfig]
LINKS = {"prefect.flow_run_id": "f-1", "prefect.flow_run_url": "http://127.0.0.1:4200/runs/flow-run/f-1"}


def client_of(context: RunContext) -> tuple[MlflowClient, Any]:
    client = open_client(context.store.root.uri, None)
    note = context.run.newest("tracking")
    assert note is not None
    return client, client.get_run(note["mlflow_run_id"])


def steps(client: MlflowClient, run: Any, key: str) -> list[int]:
    return sorted(metric.step for metric in client.get_metric_history(run.info.run_id, key))


def track(context: RunContext, status: str = "FINISHED", **links: str) -> None:
    tracker = Tracker(context, orchestrator=links)
    assert tracker.close(status) is None


def exported(context: RunContext, epoch: int) -> None:
    StageRun(make_stage(context, "export", epoch)).execute()


@pytest.fixture
def tracked(make_config: Make) -> RunContext:
    """One epoch, evaluated before and after, exported and tracked."""
    context = prepare(make_config("run.epochs=1"))
    evaluated(context, 0)
    tracker = Tracker(context, orchestrator=LINKS)
    tracker.log_evaluation(0)
    run_epoch(context, 1)
    tracker.log_epoch(1)
    evaluated(context, 1)
    tracker.log_evaluation(1)
    exported(context, 1)
    tracker.log_export(1)
    url = tracker.url()
    assert tracker.close("FINISHED") is None
    assert url is not None
    assert url.endswith(f"/runs/{tracker.run_id}?workflowType=machine_learning")
    return context


def test_a_run_in_mlflow(tracked: RunContext) -> None:
    client, run = client_of(tracked)
    assert run.info.status == "FINISHED"
    assert run.data.params["optimize.learning_rate"] == "0.001"
    assert run.data.params["algorithm"] == "grpo"
    assert run.data.params["rewards"] == "1 x jpeg_compressibility"
    assert 10 < len(run.data.params) <= content.MAX_PARAMS
    assert run.data.tags["prefect.flow_run_id"] == "f-1"
    assert len(run.data.tags["mlflow.source.git.commit"]) == 40
    expected = {
        *("reward/mean", "reward/std", "reward/jpeg_compressibility_mean"),
        *("advantage/zero_std_ratio", "advantage/group_std"),
        *("optimize/loss", "optimize/ratio_mean", "optimize/ratio_std", "optimize/clip_high", "optimize/clip_low"),
        *("optimize/approx_kl", "optimize/grad_norm"),
        *("eval/train/jpeg_compressibility_mean", "eval/heldout/jpeg_compressibility_mean"),
        *(f"time/{name}_s" for name in ("rollout", "score", "advantage", "optimize", "eval")),
        "time/score_jpeg_compressibility_s",
    }
    assert expected <= set(run.data.metrics)
    # JPEG sizes know no perfect score.
    assert not [key for key in run.data.metrics if key.endswith("_exact")]
    assert steps(client, run, "optimize/loss") == [1, 2]
    assert steps(client, run, "eval/train/jpeg_compressibility_mean") == [0, 1]
    artifacts = tracked.store.root.uri + "/mlflow-artifacts/flowmill/" + run.info.run_id + "/artifacts"
    images = list(Path(artifacts, "images").glob("*.png"))
    assert len(images) == 4
    for shown in Path(artifacts, "images").glob("*+compressed.webp"):
        with Image.open(shown) as image:
            assert image.size == (1280, 1280)
    assert sorted(output.step for output in run.outputs.model_outputs) == [0, 1]
    assert "learning_rate: 0.001" in Path(artifacts, "config.yaml").read_text()


def test_the_description_says_in_words_what_came_of_it(tracked: RunContext) -> None:
    _, run = client_of(tracked)
    text = run.data.tags["mlflow.note.content"]
    before, after = (evaluation_figures(tracked.chain, epoch) for epoch in (0, 1))
    figures = [made["heldout"]["jpeg_compressibility"]["mean"] for made in (before, after)]
    assert "**small** trains pipeline (sd3) with grpo on train.txt (8 prompts, 3 held out)" in text
    assert f"Result on held-out prompts: jpeg_compressibility {figures[0]:.3f} → {figures[1]:.3f}." in text
    assert LINKS["prefect.flow_run_url"] in text


def test_prompts_are_the_datasets_with_a_schema(tracked: RunContext) -> None:
    _, run = client_of(tracked)
    datasets = {item.tags[0].value: item.dataset for item in run.inputs.dataset_inputs}
    assert set(datasets) == {"train", "heldout"}
    assert json.loads(datasets["heldout"].profile) == {"num_rows": 3}
    assert {column["name"] for column in json.loads(datasets["train"].schema)["mlflow_colspec"]} >= {"prompt"}


def test_evaluated_policies_are_models_that_can_be_ranked(tracked: RunContext) -> None:
    client, run = client_of(tracked)
    key = "eval/heldout/jpeg_compressibility_mean"
    models = client.search_logged_models(
        [run.info.experiment_id], order_by=[{"field_name": f"metrics.`{key}`", "ascending": False}]
    )
    assert {model.name for model in models} == {"small-epoch-0", "small-epoch-1"}
    values = [next(metric for metric in model.metrics if metric.key == key) for model in models]
    assert [metric.value for metric in values] == sorted((metric.value for metric in values), reverse=True)
    assert {(metric.dataset_name, metric.dataset_digest) for metric in values} == {
        ("heldout", tracked.prompts_identity[:32])
    }
    champion = client.get_model_version_by_alias("flowmill-small", "champion")
    reward = weighted_reward(tracked.config, evaluation_figures(tracked.chain, 1))
    assert float(champion.tags["flowmill.heldout_reward"]) == reward
    of_version = next(model for model in models if model.model_id == champion.tags["flowmill.logged_model"])
    assert of_version.name == "small-epoch-1"
    assert of_version.model_id in champion.description
    assert json.loads(of_version.tags["mlflow.modelVersions"]) == [{"name": "flowmill-small", "version": 1}]
    files = Path(tracked.store.root.uri, "mlflow-artifacts", champion.source.removeprefix("mlflow-artifacts:/"))
    assert (files / "model_index.json").exists()


def test_nothing_new_changes_nothing(tracked: RunContext) -> None:
    client, before = client_of(tracked)
    tracker = Tracker(tracked, orchestrator={"prefect.flow_run_id": "another"})
    tracker.log_evaluation(1)
    tracker.log_export(1)
    assert tracker.close("FINISHED") is None
    _, after = client_of(tracked)
    assert (after.info.end_time, after.info.status) == (before.info.end_time, before.info.status)
    assert after.data.tags == before.data.tags
    assert steps(client, after, "reward/mean") == [1]


def test_a_killed_run_continues_its_curves_without_gap_or_double_point(make_config: Make) -> None:
    context = prepare(make_config())
    evaluated(context, 0)
    run_epoch(context, 1)
    track(context, "KILLED", **LINKS)
    _, first = client_of(context)
    assert first.info.status == "KILLED"
    run_epoch(context, 2)  # committed, never logged: as after a kill
    second = Tracker(context, orchestrator={})
    second.log_epoch(1)
    second.log_epoch(2)
    assert second.close("FINISHED") is None
    client, run = client_of(context)
    assert run.info.run_id == first.info.run_id
    assert steps(client, run, "reward/mean") == [1, 2]
    assert steps(client, run, "optimize/loss") == [1, 2, 3, 4]
    assert steps(client, run, "eval/train/jpeg_compressibility_mean") == [0]
    assert run.info.status == "FINISHED"


def test_epochs_done_again_are_never_mixed_with_those_before(make_config: Make) -> None:
    context = prepare(make_config("rewards=[{name: 'tests.rewards:Restless'}]"))
    evaluated(context, 0)
    for epoch in (1, 2):
        run_epoch(context, epoch)
    track(context)
    client, first = client_of(context)
    StageRun(make_stage(context, "score", 2, "tests.rewards:Restless"), force=True).execute()
    told: list[str] = []
    context.reporter.message = told.append  # type: ignore[method-assign]
    tracker = Tracker(context, orchestrator={})
    for name in ("advantage", "optimize"):
        StageRun(make_stage(context, name, 2)).execute()
    tracker.log_epoch(2)
    assert tracker.close("FINISHED") is None
    _, second = client_of(context)
    assert second.info.run_id != first.info.run_id
    assert client.get_run(first.info.run_id).info.lifecycle_stage == "deleted"
    assert steps(client, second, "reward/mean") == [1, 2]
    (point,) = (m for m in client.get_metric_history(second.info.run_id, "reward/mean") if m.step == 2)
    ref = context.chain.require(2, "advantage").ref
    assert point.value == context.store.require(ref).summary["reward_mean"]
    assert "trash" in told[0]
    names = [model.name for model in client.search_logged_models([second.info.experiment_id])]
    assert names == ["small-epoch-0"]


def test_the_champion_is_what_the_run_ends_with_or_a_better_runs(
    make_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = {("small", 1): 0.5, ("small", 2): 0.4, ("small", 3): 0.6, ("other", 1): 0.3, ("third", 1): 0.7}
    original = content.evaluation_content

    def scored(chain: Any, epoch: int) -> Any:
        made = original(chain, epoch)
        return None if made is None else replace(made, reward=scores[chain.context.run.name, epoch])

    def finished(name: str, epochs: int) -> str:
        context = prepare(
            make_config(f"run.epochs={epochs}", f"run.name={name}", "tracking.registered_model=flowmill-small")
        )
        tracker = Tracker(context, orchestrator={})
        for epoch in range(1, epochs + 1):
            run_epoch(context, epoch)
        evaluated(context, epochs)
        exported(context, epochs)
        tracker.log_export(epochs)
        assert tracker.close("FINISHED") is None
        return champion(context)

    monkeypatch.setattr(content, "evaluation_content", scored)
    # Longer and worse, longer and better, shorter again: always what the run is now.
    assert [finished("small", epochs) for epochs in (1, 2, 3, 2)] == ["1", "2", "3", "2"]
    # The third version is better than both, and nothing a run ends with.
    # Another run takes the alias if it is better.
    assert [finished("other", 1), finished("third", 1)] == ["2", "5"]


def champion(context: RunContext) -> str:
    client = open_client(context.store.root.uri, None)
    return str(client.get_model_version_by_alias("flowmill-small", "champion").version)


def test_the_database_moves_with_its_folder_and_names_no_place(tracked: RunContext, tmp_path: Path) -> None:
    old, new = Path(tracked.store.root.uri), tmp_path / "moved"
    with sqlite3.connect(old / "mlflow.db") as database:
        dump = "\n".join(database.iterdump())
    assert str(tmp_path) not in dump
    assert str(Path.cwd()) not in dump
    shutil.copytree(old, new)
    shutil.rmtree(old)
    moved = open_run(str(new), "small")
    StageRun(make_stage(moved, "evaluate", 1, "more")).execute()
    StageRun(make_stage(moved, "judge", 1, "jpeg_compressibility@more")).execute()
    track(moved)
    client, run = client_of(moved)
    assert "eval-more/heldout/jpeg_compressibility_mean" in run.data.metrics
    assert not old.exists()
    images = list((new / "mlflow-artifacts").rglob("eval-more~*.png"))
    assert len(images) == 2
    assert client.get_model_version_by_alias("flowmill-small", "champion")


def test_mlflows_global_settings_are_left_alone(tracked: RunContext) -> None:
    assert str(tracked.store.root.uri) not in mlflow.get_tracking_uri()


def test_an_outage_is_told_and_does_not_stop_training(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    context = prepare(make_config("tracking.uri=http://127.0.0.1:9"))
    told: list[str] = []
    context.reporter.message = told.append  # type: ignore[method-assign]
    tracker = Tracker(context, orchestrator={})
    run_epoch(context, 1)
    tracker.log_epoch(1)
    assert "9" in str(tracker.close("FINISHED"))
    assert any("Training goes on" in text for text in told)
