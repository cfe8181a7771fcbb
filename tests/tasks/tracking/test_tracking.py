"""Tracking against a real MLflow store on SQLite."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlflow
import pytest
from mlflow import MlflowClient
from PIL import Image

from flowmill.configs.errors import ConfigError
from flowmill.configs.load import override_config
from flowmill.flows.cli.track import track_command
from flowmill.storage import layout
from flowmill.tasks.metrics import tracked as tracked_content
from flowmill.tasks.metrics.evaluations import evaluation_figures, weighted_reward
from flowmill.tasks.metrics.rules import RULES
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runs.opening import bind_run, open_run
from flowmill.tasks.tracking import client as mlflow_client
from flowmill.tasks.tracking.client import open_client
from flowmill.tasks.tracking.locations import runs_page
from flowmill.tasks.tracking.sweeps import SweepRun
from flowmill.tasks.tracking.tracker import Tracker
from tests.conftest import FlowmillCommand
from tests.support.inside import Make, evaluate, prepare, run_epoch, run_stage
from tests.support.small import small_config

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
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
    run_stage(context, "export", epoch)


@pytest.fixture(scope="module")
def tracked_store(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of one epoch, evaluated before and after, exported and tracked; tests take copies of it."""
    folder = tmp_path_factory.mktemp("tracked")
    context = prepare(small_config(folder, tiny_base, "run.epochs=1"))
    evaluate(context, 0)
    tracker = Tracker(context, orchestrator=LINKS)
    tracker.log_evaluation(0)
    run_epoch(context, 1)
    tracker.log_epoch(1)
    evaluate(context, 1)
    tracker.log_evaluation(1)
    exported(context, 1)
    tracker.log_export(1)
    url = tracker.url()
    assert tracker.close("FINISHED") is None
    assert url is not None
    assert url.endswith(f"/runs/{tracker.run_id}?workflowType=machine_learning")
    return folder / "store"


@pytest.fixture
def tracked(tracked_store: Path, tmp_path: Path) -> RunContext:
    shutil.copytree(tracked_store, tmp_path / "store", symlinks=True)
    return open_run(str(tmp_path / "store"), "small", trusted=True)


def test_a_run_in_mlflow(tracked: RunContext) -> None:
    client, run = client_of(tracked)
    assert run.info.status == "FINISHED"
    assert run.data.params["optimize.learning_rate"] == "0.001"
    assert run.data.params["algorithm"] == "grpo"
    assert run.data.params["rewards"] == "jpeg_compressibility"
    assert len(run.data.params) == 8, "all of them stand above each image grid"
    assert run.data.tags["rollout.steps"] == str(tracked.config.rollout.steps)
    assert run.data.metrics["achieved/rollout"] == run.data.metrics["reward/mean"]
    assert run.data.metrics["achieved/heldout"] == run.data.metrics["eval/heldout/jpeg_compressibility_mean"]
    assert min(run.data.metrics, key=str.casefold).startswith("achieved/"), "MLflow shows sections in this order"
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
        "time/rollout_samples_per_s",
        "time/optimize_rows_per_s",
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
    assert "**small** trains tiny_base (sd3) with grpo on train.txt (8 prompts, 3 held out)" in text
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
    assert {model.name for model in models} == {"small-epoch-00000", "small-epoch-00001"}
    values = [next(metric for metric in model.metrics if metric.key == key) for model in models]
    assert [metric.value for metric in values] == sorted((metric.value for metric in values), reverse=True)
    assert {(metric.dataset_name, metric.dataset_digest) for metric in values} == {
        ("heldout", tracked.prompts_identity[:32])
    }
    champion = client.get_model_version_by_alias("flowmill-small", "champion")
    reward = weighted_reward(tracked.config, evaluation_figures(tracked.chain, 1))
    assert float(champion.tags["flowmill.heldout_reward"]) == reward
    of_version = next(model for model in models if model.model_id == champion.tags["flowmill.logged_model"])
    assert of_version.name == "small-epoch-00001"
    assert of_version.model_id in champion.description
    assert json.loads(of_version.tags["mlflow.modelVersions"]) == [{"name": "flowmill-small", "version": 1}]
    files = Path(tracked.store.root.uri, "mlflow-artifacts", champion.source.removeprefix("mlflow-artifacts:/"))
    assert (files / "model_index.json").exists()


def test_the_list_of_runs_opens_at_the_experiment(tracked: RunContext) -> None:
    _, run = client_of(tracked)
    page = runs_page(tracked.store.root.uri)
    assert page == f"/#/experiments/{run.info.experiment_id}/runs?workflowType=machine_learning"
    assert runs_page("/nowhere") == "/#/experiments?workflowType=machine_learning"


def test_alerts_are_a_tag(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    far = replace(RULES["kl"], fires=lambda history: "far")
    monkeypatch.setitem(RULES, "kl", far)  # type: ignore[arg-type]
    context = prepare(make_config("run.epochs=2"))
    for epoch in (1, 2):
        run_epoch(context, epoch)
    tracker = Tracker(context, orchestrator=LINKS)
    tracker.log_alerts()
    tracker.close("KILLED")
    assert client_of(context)[1].data.tags["flowmill.alerts"] == "kl@1"


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


def test_a_complete_run_comes_below_a_parent_run_that_an_outage_delayed(tracked: RunContext) -> None:
    _, before = client_of(tracked)
    tracked.config = override_config(tracked.config, ["tracking.parent=m-1"])
    track(tracked)
    _, after = client_of(tracked)
    assert after.data.tags == {**before.data.tags, "mlflow.parentRunId": "m-1"}
    assert (after.info.end_time, after.info.status) == (before.info.end_time, before.info.status)


def test_what_is_lost_for_now_stays_logged(tracked: RunContext) -> None:
    """Artifacts regenerated by a repair, or by the continued run, are equal; evaluations may have names of any form."""
    for name in ("final", "e" * 60, "würfel"):
        evaluate(tracked, 1, name)
    track(tracked)
    _, before = client_of(tracked)
    logged = curves(tracked)
    for entry in tracked.run.entries():
        if entry.stage not in ("rollout", "score", "optimize", "evaluate", "judge"):
            continue
        manifest = Path(tracked.store.root.uri) / layout.manifest(entry.ref)
        whole = manifest.read_bytes()
        manifest.unlink()
        again = open_run(tracked.store.root.uri, "small")
        track(again, "KILLED")
        manifest.write_bytes(whole)
        client, after = client_of(again)
        assert after.info.run_id == before.info.run_id, entry
        assert curves(again) == logged
    assert len(client.search_runs([after.info.experiment_id])) == 1


def test_a_killed_run_continues_its_curves_without_gap_or_double_point(make_config: Make) -> None:
    context = prepare(make_config())
    evaluate(context, 0)
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
    context = prepare(make_config("rewards=[{name: 'tests.support.rewards:Restless'}]"))
    evaluate(context, 0)
    for epoch in (1, 2):
        run_epoch(context, epoch)
    track(context)
    client, first = client_of(context)
    run_stage(context, "score", 2, "tests.support.rewards:Restless", force=True)
    reported: list[str] = []
    context.reporter.message = reported.append  # type: ignore[method-assign]
    tracker = Tracker(context, orchestrator={})
    for name in ("advantage", "optimize"):
        run_stage(context, name, 2)
    tracker.log_epoch(2)
    assert tracker.close("FINISHED") is None
    _, second = client_of(context)
    assert second.info.run_id != first.info.run_id
    assert client.get_run(first.info.run_id).info.lifecycle_stage == "deleted"
    assert steps(client, second, "reward/mean") == [1, 2]
    (point,) = (m for m in client.get_metric_history(second.info.run_id, "reward/mean") if m.step == 2)
    ref = context.chain.require(2, "advantage").ref
    assert point.value == context.store.require(ref).summary["reward_mean"]
    assert "trash" in reported[0]
    names = [model.name for model in client.search_logged_models([second.info.experiment_id])]
    assert names == ["small-epoch-00000"]


def test_the_champion_is_what_the_run_ends_with_or_a_better_runs(
    make_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = {("small", 1): 0.5, ("small", 2): 0.4, ("small", 3): 0.6, ("other", 1): 0.3, ("third", 1): 0.7}
    original = tracked_content.evaluation_content

    def scored(chain: Any, epoch: int) -> Any:
        made = original(chain, epoch)
        return None if made is None else replace(made, reward=scores[chain.run.name, epoch])

    def finished(name: str, epochs: int) -> str:
        context = prepare(
            make_config(f"run.epochs={epochs}", f"run.name={name}", "tracking.registered_model=flowmill-small")
        )
        tracker = Tracker(context, orchestrator={})
        for epoch in range(1, epochs + 1):
            run_epoch(context, epoch)
            tracker.log_epoch(epoch)
        evaluate(context, epochs)
        exported(context, epochs)
        tracker.log_export(epochs)
        assert tracker.close("FINISHED") is None
        return champion(context)

    monkeypatch.setattr(tracked_content, "evaluation_content", scored)
    # Longer and worse, longer and better, shorter again: always what the run is now.
    assert [finished("small", epochs) for epochs in (1, 2, 3, 2)] == ["1", "2", "3", "4"]
    # The third version is better than both, and nothing a run ends with.
    # Another run takes the alias if it is better.
    assert [finished("other", 1), finished("third", 1)] == ["4", "6"]
    client = open_client(make_config().store.root, None)
    versions = client.search_model_versions("name = 'flowmill-small'")
    runs = {version.version: client.get_run(version.run_id).info for version in versions}
    assert {info.lifecycle_stage for info in runs.values()} == {"active"}
    assert [number for number, info in runs.items() if info.run_name == "small (superseded)"] == [3, 2, 1]
    for version in versions:
        client.get_logged_model(version.tags["flowmill.logged_model"])
    # One whose run a person deletes counts for nothing any more.
    client.delete_run(runs[6].run_id)
    assert finished("other", 1) == "4"


def test_only_scores_of_the_same_sum_of_rewards_compete_for_the_alias(
    make_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, said = tracked_content.evaluation_content, list[str]()

    def finished(name: str, reward: float, weight: float) -> str:
        monkeypatch.setattr(
            tracked_content,
            "evaluation_content",
            lambda *of: replace(original(*of), reward=reward),  # type: ignore[type-var]
        )
        settings = [f"run.name={name}", f"rewards.0.weight={weight}", "tracking.registered_model=flowmill-small"]
        context = prepare(make_config("run.epochs=0", *settings))
        evaluate(context, 0)
        exported(context, 0)
        context.reporter = SimpleNamespace(message=said.append)  # type: ignore[assignment]
        tracker = Tracker(context, orchestrator={})
        tracker.log_export(0)
        assert tracker.close("FINISHED") is None
        return champion(context)

    assert [finished("a", 0.7, 1), finished("b", 0.5, 1)] == ["1", "1"]
    assert said == []
    assert finished("c", 0.6, 0.5) == "3"
    assert "of 0.5 x jpeg_compressibility (" in said[0]
    assert [finished("d", 0.5, 0.5), finished("e", 0.8, 1)] == ["3", "5"]


def test_runs_and_sweeps_of_another_store_on_a_server_stay_as_they_are(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two stores with equal configs: the worse run takes nothing from the better, a sweep goes on with its own."""
    scores, original = {"ann": 0.6, "bob": 0.4}, tracked_content.evaluation_content

    def scored(chain: Any, epoch: int) -> Any:
        made = original(chain, epoch)
        return None if made is None else replace(made, reward=scores[Path(chain.store.root.uri).parent.name])

    monkeypatch.setattr(tracked_content, "evaluation_content", scored)
    sweeps, uri = [], f"sqlite:///{tmp_path}/server.db"
    for who in scores:
        (folder := tmp_path / who).mkdir()
        config = small_config(folder, tiny_base, "run.epochs=1", f"tracking.uri={uri}")
        sweeps.append(SweepRun(bind_run(config), "swept", ["small"]).run_id)
        assert SweepRun(bind_run(config), "swept", ["small"]).run_id == sweeps[-1], "killed before a variant began"
        context = prepare(override_config(config, [f"tracking.parent={sweeps[-1]}"]))
        run_epoch(context, 1)
        evaluate(context, 1)
        exported(context, 1)
        tracker = Tracker(context, orchestrator={})
        tracker.log_export(1)
        assert tracker.close("FINISHED") is None
        assert SweepRun(context, "swept", ["small"]).run_id == sweeps[-1]
    assert len({*sweeps}) == 2
    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    assert client.get_model_version_by_alias("flowmill-small", "champion").version == 1
    assert not any("flowmill.superseded" in each.tags for each in client.search_model_versions("name='flowmill-small'"))


def test_a_run_at_work_is_not_ended_by_the_command_and_keeps_its_link(tiny_base: Path, tmp_path: Path) -> None:
    context = prepare(small_config(tmp_path, tiny_base))
    at_work = Tracker(context, orchestrator=LINKS)
    assert at_work.url() is not None
    with context.store.root.lock(context.run.lock_path, "the run"):
        track_command("small", root=context.store.root.uri)
        track_command("small", uri=f"sqlite:///{tmp_path}/other.db", root=context.store.root.uri)
    assert client_of(context)[1].info.status == "RUNNING"
    assert at_work.close("KILLED") is None
    track_command("small", root=context.store.root.uri)
    run = client_of(context)[1]
    assert run.info.status == "KILLED"
    assert "[Prefect flow run f-1]" in run.data.tags["mlflow.note.content"]
    other = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/other.db")
    (copy,) = other.search_runs([each.experiment_id for each in other.search_experiments()])
    assert copy.info.status == "RUNNING"
    assert "Prefect" not in copy.data.tags["mlflow.note.content"]


def champion(context: RunContext) -> str:
    client = open_client(context.store.root.uri, None)
    return str(client.get_model_version_by_alias("flowmill-small", "champion").version)


def test_the_database_moves_with_its_folder_and_names_no_place(
    tracked_store: Path, tracked: RunContext, tmp_path: Path
) -> None:
    old, new = Path(tracked.store.root.uri), tmp_path / "moved"
    with sqlite3.connect(old / "mlflow.db") as database:
        dump = "\n".join(database.iterdump())
    assert str(tracked_store.parent) not in dump
    assert str(Path.cwd()) not in dump
    old.rename(new)
    moved = open_run(str(new), "small")
    run_stage(moved, "evaluate", 1, "more")
    run_stage(moved, "judge", 1, "jpeg_compressibility@more")
    track(moved)
    client, run = client_of(moved)
    assert "eval-more/heldout/jpeg_compressibility_mean" in run.data.metrics
    assert not old.exists()
    images = list((new / "mlflow-artifacts").rglob("eval-more~*.png"))
    assert len(images) == 2
    assert client.get_model_version_by_alias("flowmill-small", "champion")


def test_mlflows_global_settings_are_left_alone(tracked_store: Path) -> None:
    assert str(tracked_store) not in mlflow.get_tracking_uri()


def test_an_outage_is_told_and_does_not_stop_training(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    context = prepare(make_config("tracking.uri=http://127.0.0.1:9"))
    reported: list[str] = []
    context.reporter.message = reported.append  # type: ignore[method-assign]
    tracker = Tracker(context, orchestrator={})
    run_epoch(context, 1)
    tracker.log_epoch(1)
    assert "9" in str(tracker.close("FINISHED"))
    assert any("The run continues" in text for text in reported)


@pytest.mark.campaign_cases("empty")
@pytest.mark.parametrize("broken", [b"no database at all " * 100, b""], ids=["text", "empty"])
def test_a_broken_database_is_named_and_made_anew(
    tracked: RunContext, flowmill: FlowmillCommand, broken: bytes
) -> None:
    root = Path(tracked.store.root.uri)
    before = curves(tracked)
    (root / "mlflow.db").write_bytes(broken)
    failed = flowmill("track", "small", "--root", str(root))
    assert failed.returncode == 1
    assert "is not a database MLflow can use" in failed.stderr
    assert "Move it away, then 'flowmill track RUN'" in failed.stderr
    assert "Traceback" not in failed.stderr
    (root / "mlflow.db").rename(root / "broken.db")
    again = flowmill("track", "small", "--root", str(root))
    assert again.returncode == 0, again.stderr
    assert curves(open_run(str(root), "small", reads=True)) == before


_HALF = """
import os, sqlite3, sys
connection = sqlite3.connect(sys.argv[1])
connection.execute("PRAGMA cache_size = 1")
connection.execute("BEGIN")
connection.executemany("INSERT INTO tags_of_ours VALUES (?, ?, 'half')", [(f"k{n}", "x" * 3000) for n in range(200)])
os._exit(9)
"""


@pytest.mark.campaign_cases("no folder", "whole")
@pytest.mark.parametrize("kept", ["whole", "damaged", "no folder"])
def test_an_empty_database_is_made_once_and_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: str) -> None:
    cache, made = tmp_path / "cache", []
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    make = mlflow_client._make_empty
    monkeypatch.setattr(mlflow_client, "_make_empty", lambda target: (made.append(target), make(target)))
    if kept == "no folder":
        cache.write_text("not a folder")
    mlflow_client.FolderClient(tmp_path / "first")
    assert len(made) == 1
    if kept == "damaged":
        (known,) = (cache / "flowmill").glob("mlflow-*.db")
        known.write_bytes(b"nothing of MLflow's " * 1000)
    second = mlflow_client.FolderClient(tmp_path / "second")
    assert len(made) == (1 if kept == "whole" else 2)
    run = second.create_run(second.create_experiment("flowmill"))
    second.log_metric(run.info.run_id, "reward/mean", 0.5)
    assert second.get_run(run.info.run_id).data.metrics == {"reward/mean": 0.5}
    assert mlflow_client.FolderClient(tmp_path / "first").search_experiments(filter_string="name = 'flowmill'") == []


def test_a_transaction_a_killed_process_left_is_taken_back(tmp_path: Path) -> None:
    open_client(str(tmp_path), None)
    database = tmp_path / "mlflow.db"
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("CREATE TABLE tags_of_ours (a, b, c)")
        connection.commit()
    assert subprocess.run([sys.executable, "-c", _HALF, str(database)], check=False).returncode == 9
    assert (tmp_path / "mlflow.db-journal").stat().st_size > 0, "a rollback is due"
    assert open_client(str(tmp_path), None).search_experiments()
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("SELECT count(*) FROM tags_of_ours").fetchone() == (0,)


@pytest.mark.campaign
def test_a_run_is_logged_to_another_tracker_too(tracked: RunContext, flowmill: FlowmillCommand, tmp_path: Path) -> None:
    root, uri = tracked.store.root.uri, f"sqlite:///{tmp_path / 'other.db'}"
    before = curves(tracked)
    for _ in range(2):
        logged = flowmill("track", "small", "--uri", uri, "--root", root)
        assert logged.returncode == 0, logged.stderr
        assert uri in logged.stdout
    other = mlflow.MlflowClient(tracking_uri=uri)
    (experiment,) = other.search_experiments(filter_string="name = 'flowmill'")
    (run,) = other.search_runs([experiment.experiment_id])
    assert {name for name in run.data.metrics if not name.startswith(("time/", "system/"))} == {
        key for key, *_ in before
    }
    assert curves(open_run(root, "small", reads=True)) == before, "its own tracker is as it was"
    for database in (Path(root) / "mlflow.db", tmp_path / "other.db"):
        first, *others = first_logged(database)
        assert first == "achieved/heldout"
        times = [number for number, key in enumerate(others) if key.startswith("time/")]
        assert not [key for key in others[times[0] :] if key.startswith(("achieved/h", "achieved/t", "eval/"))]


def first_logged(database: Path) -> list[str]:
    """Return the metrics of a database's one run in the order in which MLflow's tables and comparisons show them."""
    with closing(sqlite3.connect(database)) as connection:
        rows = connection.execute("SELECT key FROM latest_metrics ORDER BY rowid").fetchall()
    return [key for (key,) in rows if not key.startswith("system/")]


def curves(context: RunContext) -> list[tuple[str, int, float]]:
    """Return every point of the run, read past MLflow, which keeps databases open."""
    note = context.run.newest("tracking")
    assert note is not None
    with sqlite3.connect(Path(context.store.root.uri) / "mlflow.db") as database:
        rows = database.execute("SELECT key, step, value FROM metrics WHERE run_uuid = ?", (note["mlflow_run_id"],))
        return sorted(row for row in rows if not row[0].startswith(("time/", "system/")))


@pytest.mark.parametrize(
    "setting",
    [
        "tracking.uri=https://ann:secret@mlflow.example/x",
        "tracking.uri=postgresql://ann:secret@db.example/mlflow",
        "rewards=[{name: jpeg_compressibility, server: 'https://ann:secret@rewards.example'}]",
    ],
)
def test_passwords_are_refused_and_not_repeated(make_config: Make, setting: str) -> None:
    with pytest.raises(ConfigError, match="holds a password, which would be written down") as error:
        make_config(setting)
    assert "secret" not in str(error.value)
    assert make_config("tracking.uri=https://ann@mlflow.example/x").tracking.uri
