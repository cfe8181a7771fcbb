"""Links to MLflow's pages lead to where they are served, and its files lie in one folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flowmill.configs.errors import TrackingError
from flowmill.flows import artifacts
from flowmill.tasks.tracking.client import RELATIVE, FolderClient
from flowmill.tasks.tracking.locations import UI_ADDRESS, database_uri, served_at, ui_page

PAGE = "/#/experiments/1/runs/abc?workflowType=machine_learning"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def test_pages_are_where_they_are_served_and_where_they_usually_are_otherwise(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    with served_at(store, "http://127.0.0.1:5070"):
        assert ui_page(store, PAGE) == f"http://127.0.0.1:5070{PAGE}"
        assert ui_page(str(tmp_path / "other"), PAGE) == f"{UI_ADDRESS}{PAGE}"
    assert ui_page(store, PAGE) == f"{UI_ADDRESS}{PAGE}"


def test_a_note_leads_to_this_machine_alone(tmp_path: Path, state: Path) -> None:
    with served_at("store", "http://127.0.0.1:5070"):
        (note,) = (state / "flowmill" / "ui").iterdir()
        note.write_text("http://elsewhere.example/")
        assert ui_page("store", PAGE) == f"{UI_ADDRESS}{PAGE}"


def test_a_home_that_cannot_be_written_changes_nothing(state: Path) -> None:
    state.write_text("a file")
    with served_at("store", "http://127.0.0.1:5070"):
        assert ui_page("store", PAGE) == f"{UI_ADDRESS}{PAGE}"


@pytest.mark.parametrize("show", [artifacts.tracking_link, artifacts.report_link])
def test_what_prefect_shows_can_be_clicked(show: object, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(
        artifacts, "create_markdown_artifact", lambda markdown, key, description: shown.append(markdown)
    )
    assert callable(show)
    show("run", "/my store", PAGE)
    assert f"[MLflow run]({UI_ADDRESS}{PAGE})" in shown[0]
    assert "flowmill ui --root '/my store'" in shown[0]
    show("run", "/my store", "http://tracker.example/#/runs/1")
    assert "[MLflow run](http://tracker.example/#/runs/1)" in shown[1]


@pytest.mark.parametrize("case", ["location", "folder", "experiment", "file"])
def test_nothing_is_written_outside_the_folder(tmp_path: Path, case: str) -> None:
    folder, outside, note = tmp_path / "store", tmp_path / "outside", tmp_path / "model" / "note.txt"
    for each in (folder, outside, note.parent):
        each.mkdir()
    note.write_text("text")
    client = FolderClient(folder)
    place = "../../outside" if case == "location" else "one"
    run = client.create_run(client.create_experiment("one", artifact_location=f"{RELATIVE}/{place}")).info.run_id
    if case == "folder":
        (folder / "mlflow-artifacts").symlink_to(outside)
    elif case == "experiment":
        (folder / "mlflow-artifacts").mkdir()
        (folder / "mlflow-artifacts" / "one").symlink_to(outside)
    elif case == "file":
        target = folder / "mlflow-artifacts" / "one" / run / "artifacts" / "note.txt"
        target.parent.mkdir(parents=True)
        target.symlink_to(outside / "note.txt")
    with pytest.raises(TrackingError, match="Nothing outside"):
        client.log_artifacts(run, str(note.parent))
    if case != "file":
        with pytest.raises(TrackingError, match="Nothing outside"):
            client.log_artifact(run, str(note))
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize("name", ["50%20off", "a?b=c", "a#b", "a b", "über", "a+b&c;", "[a]{b}", "a:b", "~a", "'a\"b"])
def test_all_files_lie_in_the_folder_whatever_its_name(name: str, tmp_path: Path) -> None:
    folder, note = tmp_path / "top" / name, tmp_path / "note.txt"
    folder.mkdir(parents=True)
    note.write_text("text")
    client = FolderClient(folder)
    run = client.create_run(client.create_experiment("one", artifact_location=f"{RELATIVE}/one"))
    client.log_artifact(run.info.run_id, str(note))
    assert [path.name for path in folder.parent.iterdir()] == [name]
    assert {path.name for path in folder.iterdir()} == {"mlflow.db", "mlflow-artifacts"}
    again = FolderClient(folder)
    assert [entry.path for entry in again.list_artifacts(run.info.run_id)] == ["note.txt"]
    assert database_uri(folder / "mlflow.db") == again.tracking_uri


def test_artifacts_of_runs_with_similar_names_have_keys_of_their_own() -> None:
    names = ["a-b", "a_b", "A.B", "数字", "größe"]
    keys = [artifacts._key(name, "report") for name in names]
    assert keys[0] == "a-b-report"
    assert len({*keys}) == len(names)
    assert all(re.fullmatch("[a-z0-9]+(-[a-z0-9]+)*", key) for key in keys)
