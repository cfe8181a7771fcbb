"""Links in a named folder are followed; circles and links to large trees end."""

from __future__ import annotations

import ast
import os
from pathlib import Path
from typing import Any

import pytest

from flowmill.configs import folders
from flowmill.configs.base import Component
from flowmill.configs.errors import ConfigError
from flowmill.configs.fingerprint import fingerprint
from flowmill.configs.folders import changed_ns, files_below, led_to, share_files
from flowmill.configs.rewards import RewardSection
from flowmill.models.policies.single_files import _copy as copy_component
from flowmill.storage.backends.file_hash_cache import file_hashes
from flowmill.tasks.export.files import _copy as export_component
from flowmill.tasks.inputs.option_paths import OptionPath, content_of
from flowmill.tasks.inputs.weight_sources import model_files, model_identity

ROOT = Path(__file__).parents[2]
#: Who lists folders otherwise: what is a store's, or made by flowmill itself, where no link of a person's lies.
OWN = {
    "configs/folders.py",
    "storage/backends/base.py",
    "storage/backends/cache.py",
    "storage/backends/local.py",
    "storage/backends/s3.py",
    "storage/artifacts/collective_publish.py",
    "storage/maintenance/garbage_collection.py",
    "tasks/execution/launch.py",
    "tasks/execution/jobs.py",
    "tasks/export/usage.py",
}


def test_folders_are_listed_in_one_place() -> None:
    found = set()
    for room in ("configs", "storage", "models", "tasks", "flows", "flowmill"):
        for path in (ROOT / room).rglob("*.py"):
            calls = (
                node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)
            )
            if any(_descends(call) for call in calls):
                found.add(path.relative_to(ROOT).as_posix())
    assert found == OWN


def _descends(call: ast.Call) -> bool:
    """Return whether a call lists folders in folders: pathlib's follow no links below, others have no bound."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    pattern = call.args[0].value if call.args and isinstance(call.args[0], ast.Constant) else ""
    return (name in ("rglob", "walk", "copytree") and not _of_ast(call)) or (name == "glob" and "**" in str(pattern))


def _of_ast(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == "ast"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files at three depths, hidden ones too."""
    for name in ("model_index.json", "vae/config.json", "vae/deep/a.txt", ".hidden/b.json", "empty/x"):
        path = tmp_path / "model" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (tmp_path / "model" / "empty" / "x").unlink()
    return tmp_path / "model"


def test_folders_without_links_are_listed_as_ever(folder: Path) -> None:
    plain = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    assert files_below(folder) == plain == [".hidden/b.json", "model_index.json", "vae/config.json", "vae/deep/a.txt"]
    assert files_below(folder / "nowhere") == []
    assert [led_to(folder, name) for name in plain] == ["", "", "", ""]


def test_linked_folders_and_files_are_listed(folder: Path) -> None:
    (folder / "vae").rename(folder.parent / "elsewhere")
    (folder / "vae").symlink_to("../elsewhere")
    (folder / "again.json").symlink_to("model_index.json")
    (folder / "nothing.json").symlink_to("nowhere")
    (folder / "itself").symlink_to("itself")
    (folder / "pipe").mkdir()
    os.mkfifo(folder / "pipe" / "config.json")
    expected = [".hidden/b.json", "again.json", "model_index.json", "vae/config.json", "vae/deep/a.txt"]
    assert files_below(folder) == expected
    assert led_to(folder, "vae/config.json") == str((folder.parent / "elsewhere/config.json").resolve())


def test_a_circle_is_listed_once(folder: Path) -> None:
    plain = files_below(folder)
    (folder / "vae" / "deep" / "up").symlink_to("../..")
    (folder / "here").symlink_to(".")
    assert files_below(folder) == plain


def test_links_that_multiply_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty folders, each with two links to the next, are a million paths."""
    for number in range(20):
        (tmp_path / f"{number}").mkdir()
        for name in ("a", "b"):
            (tmp_path / f"{number}" / name).symlink_to(f"../{number + 1}")
    (tmp_path / "20").mkdir()
    monkeypatch.setattr(folders, "_MOST_LINKED", 1000)
    with pytest.raises(ConfigError, match=r"links in it lead to more than 1000 files, to '.*' among others"):
        files_below(tmp_path / "0")
    for number in range(1001):
        (tmp_path / "20" / f"{number}").touch()
    # Files of a folder itself are as many as they are.
    assert len(files_below(tmp_path / "20")) == 1001


def relinked(folder: Path, link: str) -> None:
    """Let a component's link lead to a copy with other contents, of the same size and time."""
    other = folder.parent / "other"
    other.mkdir()
    for file in (folder / link).iterdir():
        if file.is_file():
            (other / file.name).write_text(file.read_text().upper())
            stat = file.stat()
            os.utime(other / file.name, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    (folder / link).unlink()
    (folder / link).symlink_to("../other")


def made(place: str, kind: str) -> OptionPath:
    section = RewardSection.model_validate({"name": "clip_score"})
    assert isinstance(section, Component)
    return OptionPath(component=section, label="reward", option="model", path=place, kind=kind)


@pytest.mark.parametrize("kind", ["ModelPlace", "FolderPlace"])
def test_a_link_that_leads_elsewhere_makes_another_model(folder: Path, kind: str) -> None:
    (folder / "vae").rename(folder.parent / "first")
    (folder / "vae").symlink_to("../first")
    for file in (folder.parent / "first").iterdir():
        os.utime(file, ns=(10**18, 10**18))
    before, reward = model_identity(str(folder), None), content_of(made(str(folder), kind), list)
    assert reward is not None
    assert before == {"files": file_hashes(folder, model_files(folder))}
    assert "vae/config.json" in before["files"]
    relinked(folder, "vae")
    after = content_of(made(str(folder), kind), list)
    assert after is not None
    assert model_identity(str(folder), None)["files"]["vae/config.json"] != before["files"]["vae/config.json"]
    assert after.digest != reward.digest
    # The files are of long ago, the link is not.
    assert after.changed_ns == (folder / "vae").lstat().st_mtime_ns == changed_ns(folder, "vae/config.json")


def test_copies_hold_what_links_lead_to(folder: Path) -> None:
    (folder / "vae" / "deep").rename(folder.parent / "deep")
    (folder / "vae" / "deep").symlink_to("../../deep")
    for number, copy in enumerate((copy_component, export_component)):
        copy(folder / "vae", folder.parent / f"{number}")
        assert (folder.parent / f"{number}" / "deep" / "a.txt").read_text() == "vae/deep/a.txt"
        assert not (folder.parent / f"{number}" / "deep").is_symlink()


def test_a_folder_called_as_a_snapshot_counts_by_its_commit_only_as_the_hub_keeps_it(tmp_path: Path) -> None:
    commit = "0" * 40
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / commit, tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "abc").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/abc")
    assert model_identity(str(snapshot), None) == {"hub": str(snapshot), "commit": commit}
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").write_text('{"other": 1}')
    found: dict[str, Any] = model_identity(str(snapshot), None)
    assert fingerprint(found) == fingerprint({"files": file_hashes(snapshot, ["config.json"])})


@pytest.mark.parametrize(("above", "expected"), [(0o755, 0o644), (0o2775, 0o664), (0o700, 0o600)])
def test_files_get_the_permissions_of_the_folder_that_they_come_into(tmp_path: Path, above: int, expected: int) -> None:
    (tmp_path / "made" / "deep").mkdir(parents=True)
    (tmp_path / "own").touch(0o600)
    (tmp_path / "made" / "link").symlink_to(tmp_path / "own")
    for name in ("made/a", "made/deep/b"):
        (tmp_path / name).touch(0o600)
    (tmp_path / "above").mkdir()
    (tmp_path / "above").chmod(above)
    share_files(tmp_path / "made", tmp_path / "above")
    assert {(tmp_path / name).stat().st_mode & 0o777 for name in ("made/a", "made/deep/b")} == {expected}
    assert (tmp_path / "own").stat().st_mode & 0o777 == 0o600
