"""Links to MLflow's pages lead to where they are served."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowmill.flows import artifacts
from flowmill.tasks.tracking.locations import UI_ADDRESS, served_at, ui_page

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
