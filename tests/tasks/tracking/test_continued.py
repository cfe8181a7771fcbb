"""A run that is killed, fails to be tracked, or grows has one MLflow run, which holds everything once."""

from __future__ import annotations

import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from mlflow import MlflowClient
from mlflow.store.tracking.dbmodels.models import Base
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
from sqlalchemy import String

from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runs.opening import begin_run
from flowmill.tasks.tracking import logged
from flowmill.tasks.tracking.client import open_client
from flowmill.tasks.tracking.tracker import Tracker
from tests.support.inside import Make, evaluate, prepare, run_epoch, run_stage
from tests.support.small import small_config
from tests.tasks.tracking.test_tracking import client_of, exported, steps, track

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


class Killed(BaseException):
    """Stands for the end of the process."""


def stops_once(place: type, method: str, *, when: Callable[..., bool] = lambda *_, **__: True) -> Any:
    """Let a method stop the process, as it were, the first time that some arguments come."""
    plain, stopped = getattr(place, method), []

    def method_of(self: Any, *given: Any, **named: Any) -> Any:
        if not stopped and when(*given, **named):
            stopped.append(given)
            raise Killed
        return plain(self, *given, **named)

    return patch.object(place, method, method_of)


def broken_off(context: RunContext, series: str, stops: Any) -> Tracker:
    """Return the tracker of a run that was stopped."""
    work = Tracker._work

    def dies(self: Tracker) -> None:
        with suppress(Killed):
            work(self)

    with stops, patch.object(Tracker, "_work", dies):
        tracker = Tracker(context, orchestrator={}, series=series)
        tracker.close("KILLED")
    return tracker


def is_tag_of_last(run_id: str, tags: Any) -> bool:
    return any("logged" in tag.key and '"2:"' in tag.value for tag in tags)


def is_point_of_last(run_id: str, metrics: Any, **_: Any) -> bool:
    return any(metric.step == 2 and metric.model_id for metric in metrics)


def evaluated(make_config: Make, *settings: str) -> RunContext:
    """Return a run of two epochs, each evaluated."""
    context = prepare(make_config("run.epochs=2", *settings))
    evaluate(context, 0)
    for epoch in (1, 2):
        run_epoch(context, epoch)
        evaluate(context, epoch)
    return context


@pytest.fixture(scope="module")
def evaluated_store(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluated")
    evaluated(partial(small_config, folder, tiny_base))
    return folder / "store"


@pytest.fixture
def context(evaluated_store: Path, make_config: Make, tmp_path: Path) -> RunContext:
    """A run of two epochs, each evaluated, in a store of its own."""
    shutil.copytree(evaluated_store, tmp_path / "store", symlinks=True)
    return begin_run(make_config())


#: Between points, those of the model and tags, which are a transaction each, and around the model.
MOMENTS = (
    lambda: stops_once(SqlAlchemyStore, "_set_tags", when=is_tag_of_last),
    lambda: stops_once(SqlAlchemyStore, "_log_model_metrics", when=is_point_of_last),
    lambda: stops_once(MlflowClient, "log_outputs"),
    lambda: stops_once(MlflowClient, "finalize_logged_model"),
    lambda: stops_once(MlflowClient, "log_inputs"),
    lambda: stops_once(MlflowClient, "log_text"),
)


def test_what_a_kill_left_half_logged_is_completed_and_nothing_is_there_twice(context: RunContext) -> None:
    for number, moment in enumerate(MOMENTS):
        first = broken_off(context, f"tracking-{number}", moment())
        again = Tracker(begin_run(context.config), orchestrator={}, series=f"tracking-{number}")
        assert again.close("FINISHED") is None
        assert again.run_id == first.run_id
        client = open_client(context.store.root.uri, None)
        check_complete(context, client, client.get_run(str(again.run_id)))


def check_complete(context: RunContext, client: MlflowClient, run: Any) -> None:
    """Check that an MLflow run holds everything of a run of two epochs, and once."""
    for key in run.data.metrics:
        points = [point.step for point in client.get_metric_history(run.info.run_id, key)]
        assert len(points) == len(set(points)), key
    assert steps(client, run, "eval/train/jpeg_compressibility_mean") == [0, 1, 2]
    assert {item.tags[0].value for item in run.inputs.dataset_inputs} == {"train", "heldout"}
    assert len(run.data.params) == 8
    assert Counter(output.step for output in run.outputs.model_outputs) == {0: 1, 1: 1, 2: 1}
    where = [run.info.experiment_id], f"source_run_id = '{run.info.run_id}'"
    models = client.search_logged_models(*where)
    assert [model.status.value for model in models] == ["READY"] * 3
    for model in models:
        assert Counter(metric.key for metric in model.metrics)["eval/heldout/jpeg_compressibility_mean"] == 1
    artifacts = Path(context.store.root.uri, "mlflow-artifacts", "flowmill", run.info.run_id, "artifacts")
    assert (artifacts / "config.yaml").exists()
    assert len(list(artifacts.glob("images/*.png"))) == 6, "one of each list and evaluation"


def test_images_sort_by_epoch_and_those_of_an_earlier_version_keep_their_names(context: RunContext) -> None:
    # An earlier version, which did not pad epochs, was killed after the images of the first evaluation.
    with patch.object(logged, "epoch_digits", str):
        earlier = broken_off(context, "tracking", stops_once(MlflowClient, "log_outputs"))
    folder = Path(context.store.root.uri, "mlflow-artifacts", "flowmill", str(earlier.run_id), "artifacts", "images")
    kept = {path.name for path in folder.iterdir()}
    assert len(kept) == 4
    assert all("+step+0+" in name for name in kept)
    assert Tracker(begin_run(context.config), orchestrator={}).close("FINISHED") is None
    added = sorted({path.name for path in folder.iterdir()} - kept)
    assert kept < {path.name for path in folder.iterdir()}
    assert [name.partition("+timestamp")[0] for name in added if name.endswith(".png")] == [
        f"eval~{split}+step+0000{epoch}" for split in ("heldout", "train") for epoch in (1, 2)
    ]


def test_points_have_the_time_of_their_commit(context: RunContext) -> None:
    track(context)
    client, run = client_of(context)
    records = context.store.shards(context.chain.require(2, "optimize").ref)
    done = max(record.producer["started"] + record.producer["seconds"] for record in records)
    (point,) = (p for p in client.get_metric_history(run.info.run_id, "reward/mean") if p.step == 2)
    assert point.timestamp == int(done * 1000)


def test_a_version_whose_mark_a_failure_left_out_is_marked_later(make_config: Make) -> None:
    context = prepare(make_config("run.epochs=1"))
    evaluate(context, 0)
    run_epoch(context, 1)
    evaluate(context, 1)
    exported(context, 1)
    for outage in (OSError("no space"), None):
        with patch.object(MlflowClient, "set_logged_model_tags", side_effect=outage) if outage else nullcontext():
            tracker = Tracker(context, orchestrator={})
            tracker.log_export(1)
            assert ("no space" in str(tracker.close("FINISHED"))) == bool(outage)
    client, run = client_of(context)
    (named,) = (
        model.tags["mlflow.modelVersions"]
        for model in client.search_logged_models([run.info.experiment_id])
        if "mlflow.modelVersions" in model.tags
    )
    assert named == '[{"name": "flowmill-small", "version": 1}]'


def test_a_run_that_grows_keeps_its_mlflow_run(make_config: Make) -> None:
    """The evaluation of a last epoch is not scheduled any more once the run has grown: it stays a result."""
    made = []
    for epochs in (1, 2, 3, 4):
        context = prepare(make_config(f"run.epochs={epochs}", "evaluate.every=2"))
        evaluate(context, 0)
        run_epoch(context, epochs)
        evaluate(context, epochs)
        exported(context, epochs)
        tracker = Tracker(context, orchestrator={})
        tracker.log_export(epochs)
        assert tracker.close("FINISHED") is None
        made.append(tracker.run_id)
    assert len(set(made)) == 1
    client, run = client_of(context)
    assert steps(client, run, "eval/heldout/jpeg_compressibility_mean") == [0, 1, 2, 3, 4]
    assert steps(client, run, "reward/mean") == [1, 2, 3, 4]
    assert len(client.search_runs([run.info.experiment_id])) == 1
    # From what is committed another tracker gets the same, however the run came to be.
    other = Tracker(context, orchestrator={}, series="tracking-other")
    assert other.close("FINISHED") is None
    again = client.get_run(str(other.run_id))
    # The machine's load has points only if logging takes long enough.
    logged = ({key for key in each.data.metrics if not key.startswith("system/")} for each in (again, run))
    assert next(logged) == next(logged)
    assert steps(client, again, "eval/heldout/jpeg_compressibility_mean") == [0, 1, 2, 3, 4]


def test_a_changed_past_begins_another_mlflow_run(make_config: Make) -> None:
    context = evaluated(make_config, "evaluate.every=2")
    track(context)
    _, first = client_of(context)
    again = prepare(make_config("run.epochs=2", "evaluate.every=2", "evaluate.samples=2"))
    for epoch in (0, 2):
        evaluate(again, epoch)
    track(again)
    _, second = client_of(again)
    assert second.info.run_id != first.info.run_id


def test_every_name_a_person_chooses_reaches_mlflow(make_config: Make, tmp_path: Path) -> None:
    """Whatever it is; and every text fits the columns of a database that, unlike SQLite, holds to them."""
    long = "a_list_about_topic_" * 10
    lists = [tmp_path / f"{long}{n}.txt" for n in range(8)]
    for n, each in enumerate(lists):
        each.write_text(f"topic {n} a\ntopic {n} b\n")
    listed = ", ".join(f"{{name: {'s' * 90}{n}, train: {each}}}" for n, each in enumerate(lists))
    context = prepare(
        make_config(
            "run.epochs=1",
            f"prompts={{sources: [{listed}]}}",
            f"tracking.experiment='../a#b?c%d {'x' * 400}'",
            "tracking.registered_model='team/model:1'",
            f"rewards=[{{name: jpeg_compressibility, label: {'r' * 100}}}]",
            "rollout.prompts_per_epoch=8",
        )
    )
    evaluate(context, 0)
    run_epoch(context, 1)
    evaluate(context, 1)
    exported(context, 1)
    name, label = "e" * 60, "r" * 100
    for stage, slot in (("evaluate", name), ("judge", f"{label}@{name}")):
        run_stage(context, stage, 1, slot)
    tracker = Tracker(context, orchestrator={})
    tracker.log_export(1)
    assert tracker.close("FINISHED") is None
    assert Tracker(context, orchestrator={}).close("FINISHED") is None
    _, run = client_of(context)
    (prompts,) = (each.dataset.name for each in run.inputs.dataset_inputs)
    assert len(prompts) == 500
    assert f"eval-{name}/train/{label}_mean" in run.data.metrics
    assert {len(key) for key in run.data.metrics if key.startswith(f"eval-{name}/train/{label}_s")} == {250}
    root = Path(context.store.root.uri)
    assert all(root in path.parents for path in tmp_path.rglob("*.png"))
    assert too_long(root / "mlflow.db") == []


def too_long(database: Path) -> list[str]:
    """Return the columns of MLflow's tables that hold more than they declare."""
    found = []
    with sqlite3.connect(database) as connection:
        for table in Base.metadata.sorted_tables:
            for column in table.columns:
                if isinstance(column.type, String) and column.type.length:
                    query = f'SELECT max(length("{column.name}")) FROM "{table.name}"'
                    (most,) = connection.execute(query).fetchone()
                    if (most or 0) > column.type.length:
                        found.append(f"{table.name}.{column.name} {most} > {column.type.length}")
    return found
