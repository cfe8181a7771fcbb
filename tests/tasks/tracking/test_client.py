"""The client of a folder with database and artifacts, wherever the folder lies."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowmill.tasks.tracking.client import RELATIVE, FolderClient
from flowmill.tasks.tracking.locations import database_uri


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
