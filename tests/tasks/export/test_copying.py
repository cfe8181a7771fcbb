"""Folders that commands write for users: whole, or not there at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flowmill.configs.errors import ConfigError, StoreError
from flowmill.tasks.export.copying import check_new_folder, new_folder
from flowmill.tasks.reports.report import check_report
from tests.conftest import ROOT

#: Writes a part of a folder, and is killed.
KILLED = """
import os, signal, sys
from pathlib import Path
from flowmill.tasks.export.copying import new_folder
with new_folder(Path(sys.argv[1]), over=["old"]) as folder:
    (folder / "first").write_text("1")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.parametrize("before", [[], ["old"]])
def test_a_kill_leaves_the_folder_as_it_was_and_the_next_command_leaves_nothing_else(
    before: list[str], tmp_path: Path
) -> None:
    target = tmp_path / "out"
    if before:
        target.mkdir()
        (target / "old").write_text("0")
    killed = subprocess.run([sys.executable, "-c", KILLED, str(target)], cwd=ROOT, env=dict(os.environ), check=False)
    assert killed.returncode == -signal.SIGKILL
    assert (os.listdir(target) if target.exists() else []) == before
    with new_folder(target, over=["old"]) as folder:
        assert (os.listdir(target) if target.exists() else []) == before
        (folder / "first").write_text("1")
    assert os.listdir(target) == ["first"]
    assert os.listdir(tmp_path) == ["out"]


def test_the_working_directory_and_the_target_of_a_link_are_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, disk, link = (tmp_path / name for name in ("here", "disk", "link"))
    here.mkdir()
    disk.mkdir()
    link.symlink_to(disk)
    monkeypatch.chdir(here)
    (here / "old").write_text("0")
    for target in (Path(), link):
        with new_folder(target, over=["old"]) as folder:
            (folder / "first").write_text("1")
    assert os.listdir(".") == os.listdir(disk) == ["first"]
    assert link.is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["disk", "here", "link"]


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'.*/out' cannot be written"), new_folder(tmp_path / "a" / "out") as folder:
        (folder / "no" / "folder").touch()
    assert os.listdir(tmp_path / "a") == []


def test_other_files_are_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    # The second of the names alone is another's file.
    for target, over in ((tmp_path, ["old"]), (tmp_path / "notes", ["old"]), (tmp_path, ["old", "notes"])):
        with pytest.raises(ConfigError, match="exists and is not empty"), new_folder(target, over=over):
            pass
    assert os.listdir(tmp_path) == ["notes"]


def test_where_nothing_can_be_made_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for target in (tmp_path / "file" / "out", Path("/proc/none/out"), Path("/dev/null/out")):
        with pytest.raises(ConfigError, match=f"'{target}' cannot be written"):
            check_new_folder(target)
    check_new_folder(tmp_path / "a" / "b" / "out")
    assert os.listdir(tmp_path) == ["file"]


def test_a_report_is_refused_before_the_work_where_it_cannot_be_written(tmp_path: Path) -> None:
    for file in (tmp_path, Path("/proc/version")):
        with pytest.raises(StoreError, match=f"cannot be written to '{file}'"):
            check_report(file)
    with pytest.raises(ConfigError, match="cannot be written"):
        check_report(Path("/proc/none.html"))
    check_report(Path("/dev/null"))
    (tmp_path / "old.html").write_text("old")
    check_report(tmp_path / "old.html")
    check_report(tmp_path / "new" / "report.html")
    assert (tmp_path / "old.html").read_text() == "old"
    assert os.listdir(tmp_path) == ["old.html"]
