"""Disks that are full, read-only or of another user, wherever a command writes: a message, and no traceback."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

from flowmill.configs.errors import ConfigError, FlowmillError, StoreError, TrackingError
from flowmill.configs.schema import StoreSection
from flowmill.configs.user_directories import user_cache, user_state
from flowmill.flows.cli import app
from flowmill.flows.cli.error_reporting import report_errors
from flowmill.flows.server import _starts_early, check_home
from flowmill.storage.backends import open_backend
from flowmill.storage.backends.base import BLOCK, FileEntry
from flowmill.storage.backends.cache import Cache
from flowmill.storage.backends.file_hash_cache import file_hashes
from flowmill.storage.backends.s3 import RemoteFile
from flowmill.tasks.inputs.store_trust import check_trusted, remember
from flowmill.tasks.runs.context import RunContext
from tests.conftest import ConfigFactory
from tests.support.writes import failing_below

ERRORS = [errno.ENOSPC, errno.EROFS, errno.EIO]
by_error = pytest.mark.parametrize("number", ERRORS, ids=errno.errorcode.get)

WRITING = [
    "init tiny_sd3 --to {out}/configs",
    "report small --out {out}/report.html",
    pytest.param("diff small small --images {out}/report.html", marks=pytest.mark.campaign),
    "export small --to {out}/model",
    "store export small {out}/table",
    pytest.param("store export small {out}/table --format datasets", marks=pytest.mark.campaign),
    pytest.param("store export small {out}/table --format delta", marks=pytest.mark.campaign),
    "store cp small {out}/copy",
    "run {config} --root {out}/store --quiet",
    "run {config} --root {out}/store --dry",
]


def said_by(line: str, capsys: pytest.CaptureFixture[str], **names: object) -> str:
    """Return what a command that fails says last."""
    arguments = [word.format(**names) for word in line.split()]
    with pytest.raises(SystemExit) as ended, report_errors():
        app(arguments, standalone_mode=False)
    printed = capsys.readouterr()
    assert ended.value.code == 1, printed.err
    assert "Traceback" not in printed.err + printed.out
    return printed.err.strip().splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("line", WRITING)
def test_what_cannot_be_written_is_named(
    finished_run: tuple[RunContext, Path],
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    context, config = finished_run
    monkeypatch.setenv("FLOWMILL_ROOT", context.store.root.uri)
    with failing_below(str(tmp_path / "out"), errno.ENOSPC):
        said = said_by(line, capsys, out=tmp_path / "out", config=config)
    assert said.startswith("flowmill: ")
    assert str(tmp_path / "out") in said
    assert "No space left on device" in said


@pytest.mark.slow
@by_error
def test_what_changes_a_store_that_cannot_be_written_says_so(
    finished_run: tuple[RunContext, Path], number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    root = finished_run[0].store.root.uri
    with failing_below(root, number):
        for line in ("store gc --delete", "store repair"):
            said = said_by(f"{line} --root {root}", capsys)
            assert root in said
            assert os.strerror(number) in said


@pytest.mark.campaign
def test_a_stage_in_a_store_that_cannot_be_written_says_so(
    finished_run: tuple[RunContext, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    root = finished_run[0].store.root.uri
    with failing_below(root, errno.EROFS):
        said = said_by(f"stage score --run small --epoch 1 --force --root {root}", capsys)
    assert root in said
    assert "Read-only file system" in said


@by_error
def test_any_other_error_of_the_system_is_a_message(
    number: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FLOWMILL_TRACEBACK", raising=False)
    with pytest.raises(SystemExit), report_errors():
        raise OSError(number, os.strerror(number), "/some/where")
    said = capsys.readouterr().err
    assert said.startswith(f"flowmill: '/some/where': {os.strerror(number)}. ")
    assert len(said.splitlines()) == 1
    monkeypatch.setenv("FLOWMILL_TRACEBACK", "1")
    with pytest.raises(SystemExit), report_errors():
        raise OSError("of a library, without a number")
    said = capsys.readouterr().err
    assert said.startswith("Traceback")
    assert said.splitlines()[-1] == "flowmill: OSError: of a library, without a number."


@by_error
def test_without_a_home_that_can_be_written_everything_works_but_is_not_remembered(
    number: int, make_config: ConfigFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config()
    for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with failing_below(str(tmp_path / "home"), number):
        remember(config)
        (tmp_path / "weights").write_bytes(b"1")
        os.utime(tmp_path / "weights", (1, 1))
        assert set(file_hashes(tmp_path, ["weights"])) == {"weights"}
    assert not (tmp_path / "home").exists()
    with pytest.raises(FlowmillError, match="no config given on this machine"):
        check_trusted(config, config, run="small")


@by_error
def test_prefects_home_is_named(number: int, tmp_path: Path) -> None:
    from prefect.settings import PREFECT_HOME, temporary_settings

    with (
        temporary_settings({PREFECT_HOME: tmp_path / "home"}),
        failing_below(str(tmp_path / "home"), number),
        pytest.raises(FlowmillError, match="PREFECT_HOME to a folder that can be written") as failed,
    ):
        check_home()
    assert f"'{tmp_path / 'home'}' cannot be written: {os.strerror(number)}" in str(failed.value)


def test_no_server_starts_before_prefect_where_it_cannot_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "prefect")
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "home"))
    with failing_below(str(tmp_path / "home"), errno.EROFS):
        assert not _starts_early()
    assert _starts_early()


def test_a_user_without_a_home_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    for variable, place in (("XDG_CACHE_HOME", user_cache), ("XDG_STATE_HOME", user_state)):
        monkeypatch.delenv(variable, raising=False)
        with pytest.raises(ConfigError, match=f"Set HOME, or {variable}"):
            place()
        monkeypatch.setenv(variable, "/x")
        assert place() == Path("/x/flowmill")


@by_error
def test_mlflows_folder_is_named(number: int, tmp_path: Path) -> None:
    from flowmill.tasks.tracking.client import open_client, reaching

    with (
        failing_below(str(tmp_path / "store"), number),
        pytest.raises(TrackingError, match="The report could not be logged to sqlite") as failed,
        reaching(f"sqlite:///{tmp_path}/store", "The report"),
    ):
        open_client(str(tmp_path / "store"), None)
    assert os.strerror(number) in str(failed.value)
    assert "\n" not in str(failed.value)


class _Bucket:
    """A bucket with one object."""

    def get_range(self, path: str, start: int, end: int) -> bytes:
        return (b"x" * BLOCK)[start:end]

    def get_many(self, paths: list[str]) -> list[bytes | None]:
        return [b"x" * BLOCK for _ in paths]


@by_error
def test_a_cache_of_s3_that_cannot_be_written(number: int, tmp_path: Path) -> None:
    """Ranges are read without it; what needs a whole file on the disk says which setting names another folder."""
    (tmp_path / "data").write_bytes(b"x" * BLOCK)
    from flowmill.storage.backends.checksums import describe_file

    entry: FileEntry = describe_file(tmp_path / "data", "data")
    with failing_below(str(tmp_path / "cache"), number):
        cache = Cache(tmp_path / "cache" / "one", 1 << 30)
        file = RemoteFile(_Bucket(), "a/data", entry, cache)  # type: ignore[arg-type]
        assert bytes(file.read(3, 5)) == b"xxxxx"
        assert bytes(file.read(0, 2)) == b"xx"
        for refused in (lambda: cache.staging, lambda: cache.hold(cache.folder / "a")):
            with pytest.raises(StoreError, match=r"set store\.cache or XDG_CACHE_HOME to another folder") as failed:
                refused()
            assert f"'{cache.folder}', cannot be written: {os.strerror(number)}" in str(failed.value)


@by_error
def test_a_root_that_cannot_be_made(number: int, tmp_path: Path) -> None:
    with failing_below(str(tmp_path / "store"), number), pytest.raises(StoreError, match="with --root"):
        open_backend(StoreSection(root=str(tmp_path / "store")))
