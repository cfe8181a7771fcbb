"""Checksums of a local model are kept by path, size and time; a deep look reads everything again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from flowmill.configs.model import ModelSection
from flowmill.configs.schema import RunConfig
from flowmill.storage.backends import file_hash_cache
from flowmill.storage.backends.checksums import hash_file
from flowmill.storage.backends.file_hash_cache import file_hashes
from flowmill.tasks.inputs.weight_sources import changed_files, model_identity
from flowmill.tasks.runs.opening import finished_result, mark_finished
from tests.support.inside import prepare


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were read."""
    names: list[str] = []

    def spy(path: Path) -> str:
        names.append(path.name)
        return hash_file(path)

    monkeypatch.setattr(file_hash_cache, "hash_file", spy)
    return names


def write(path: Path, content: bytes, *, age_s: float = 60) -> None:
    path.write_bytes(content)
    then = time.time_ns() - int(age_s * 1e9)
    os.utime(path, ns=(then, then))


def test_a_file_is_read_once_until_its_size_or_time_changes(tmp_path: Path, read: list[str]) -> None:
    write(tmp_path / "a", b"one")
    write(tmp_path / "b", b"two")
    first = file_hashes(tmp_path, ["a", "b"])
    assert (
        file_hashes(tmp_path, ["a", "b"]) == first == {"a": hash_file(tmp_path / "a"), "b": hash_file(tmp_path / "b")}
    )
    assert read == ["a", "b"]
    write(tmp_path / "a", b"uno", age_s=30)
    assert file_hashes(tmp_path, ["a", "b"])["a"] == hash_file(tmp_path / "a") != first["a"]
    assert read == ["a", "b", "a"]


def test_files_of_a_folder_that_are_asked_for_apart_are_kept_together(tmp_path: Path, read: list[str]) -> None:
    for name in ("a", "b", "c"):
        write(tmp_path / name, b"one")
        file_hashes(tmp_path, [name])
    (tmp_path / "c").unlink()
    for name in ("a", "b"):
        file_hashes(tmp_path, [name])
        file_hashes(tmp_path, [name], deep=True)
    assert read == ["a", "b", "c", "a", "b"]
    assert "c" not in file_hash_cache._load(tmp_path)


def test_what_changed_just_now_is_not_trusted_yet(tmp_path: Path, read: list[str]) -> None:
    write(tmp_path / "a", b"one", age_s=0)
    file_hashes(tmp_path, ["a"])
    file_hashes(tmp_path, ["a"])
    assert read == ["a", "a"]


def test_a_damaged_cache_costs_a_look_only(tmp_path: Path, read: list[str]) -> None:
    write(tmp_path / "a", b"one")
    first = file_hashes(tmp_path, ["a"])
    file_hash_cache.cache_place(tmp_path).write_text('{"files": [1]}')
    assert file_hashes(tmp_path, ["a"]) == first
    assert read == ["a", "a"]


def test_without_a_writable_home_a_process_reads_a_file_once(
    tmp_path: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a", b"old")
    file_hashes(tmp_path, ["a"])
    read.clear()
    # With an entry of before.
    monkeypatch.setattr(Path, "write_text", Mock(side_effect=PermissionError))
    write(tmp_path / "a", b"one", age_s=50)
    first = file_hashes(tmp_path, ["a"])
    assert file_hashes(tmp_path, ["a"]) == first
    assert read == ["a"]
    write(tmp_path / "a", b"uno", age_s=30)
    assert file_hashes(tmp_path, ["a"]) != first
    monkeypatch.undo()
    write(tmp_path / "a", b"ein", age_s=20)
    assert file_hashes(tmp_path, ["a"])["a"] == file_hash_cache._load(tmp_path)["a"][2], "it is stored again"


def test_only_a_deep_look_sees_a_change_whose_time_was_set_back(tmp_path: Path) -> None:
    write(tmp_path / "model_index.json", b"one")
    stat = (tmp_path / "model_index.json").stat()
    section = ModelSection(policy="sd3", path=str(tmp_path))
    first = model_identity(str(tmp_path), None)
    (tmp_path / "model_index.json").write_bytes(b"two")
    os.utime(tmp_path / "model_index.json", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert model_identity(str(tmp_path), None) == first
    assert changed_files(section) == ["model_index.json"]
    assert changed_files(section) == []
    assert model_identity(str(tmp_path), None) != first


def test_a_run_from_a_local_folder_is_finished_without_reading_it_until_it_changes(
    make_config: Callable[..., RunConfig],
    tiny_base: Path,
    tmp_path: Path,
    read: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import shutil

    shutil.copytree(tiny_base, tmp_path / "model")
    for path in (tmp_path / "model").rglob("*.*"):
        write(path, path.read_bytes())
    context = prepare(make_config(f"model.path={tmp_path / 'model'}"))
    # What came of it, a run without epochs cannot tell.
    assert finished_result(context) is None
    mark_finished(context, {"mean": 1})
    read.clear()
    assert finished_result(context) == {"mean": 1}
    assert read == []
    write(tmp_path / "model" / "model_index.json", b"{}")
    assert finished_result(context) is None
