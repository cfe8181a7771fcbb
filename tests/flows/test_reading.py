"""Commands that only read: they write nothing to a store, so that one that may not be written is read as any other."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import flowmill
from flowmill.configs.schema import StoreSection
from flowmill.flows.cli import app
from flowmill.storage.backends import open_backend
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runs.locks import executing
from flowmill.tasks.runs.state import state_of
from tests.support.writes import writes_below

pytestmark = pytest.mark.slow

READING = [
    "status",
    "status small",
    "status small --json",
    "status small --why optimize@1",
    "diff small small",
    pytest.param("diff small small --images {out}/diff.html", marks=pytest.mark.campaign),
    "report small --out {out}/report.html",
    "export small --to {out}/model",
    "run {config} --set run.epochs=1 --quiet",
    "run {config} --set run.epochs=1 --dry",
    "run {config} --set run.epochs=2 --dry",
    "store ls",
    "store show small/rollout@1",
    "store show small/rollout@1 --sample e00001-g0000-r000",
    "store verify",
    "store verify --deep",
    "store gc",
    "store gc --keep-epochs 1",
    "store digest small",
    "store export small {out}/table",
    "store cp small {out}/copy",
]


def carried_out(line: str, context: RunContext, config: Path, out: Path) -> Any:
    arguments = [word.format(out=out, config=config) for word in line.split()]
    sample = flowmill.open(context.store.root.uri).run("small").samples(1).column("sample_id")[0].as_py()
    arguments = [sample if word.startswith("e00001-") else word for word in arguments]
    return CliRunner().invoke(app, [*arguments, "--root", context.store.root.uri])


@pytest.mark.parametrize("line", READING)
def test_what_reads_writes_nothing(finished_run: tuple[RunContext, Path], line: str, tmp_path: Path) -> None:
    context, config = finished_run
    with writes_below(context.store.root.uri) as found:
        done = carried_out(line, context, config, tmp_path)
    assert (done.exit_code, done.exception) == (0, None), done.output
    assert found == []


def test_the_python_api_writes_nothing(finished_run: tuple[RunContext, Path]) -> None:
    context, _ = finished_run
    with writes_below(context.store.root.uri) as found:
        store = flowmill.open(context.store.root.uri)
        run = store.run("small")
        samples = run.samples(1).to_pandas()
        sample = samples.sample_id[0]
        assert run.images(1, [sample])[sample] is not None
        assert run.trace(1, sample)
    assert found == []


def test_looking_whether_a_run_is_executed_writes_nothing(finished_run: tuple[RunContext, Path]) -> None:
    context, _ = finished_run
    assert state_of(context, complete=False) == "stopped"
    with executing(context), writes_below(context.store.root.uri) as found:
        assert state_of(context, complete=False) == "running"
    assert found == []


def test_what_is_written_is_heard(finished_run: tuple[RunContext, Path]) -> None:
    context, _ = finished_run
    with writes_below(context.store.root.uri) as found, context.store.root.lock(context.run.lock_path, "Run"):
        pass
    assert any(context.run.lock_path in line for line in found)


def test_opening_a_store_writes_nothing_to_it(tmp_path: Path) -> None:
    (tmp_path / "store" / "runs").mkdir(parents=True)
    with writes_below(str(tmp_path)) as found:
        open_backend(StoreSection(root=str(tmp_path / "store")))
    assert found == []


@contextmanager
def read_only(folder: Path) -> Iterator[list[str]]:
    """Give what a command begins with so that a folder cannot be written, by root either."""
    script = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", script, str(folder)]
    tried = shutil.which("unshare") and subprocess.run([*command, "true"], capture_output=True, check=False)
    if not tried or tried.returncode != 0:
        pytest.skip("this user may not make a folder read-only for root")
    yield command


@pytest.mark.campaign
def test_a_store_on_a_read_only_file_system(finished_run: tuple[RunContext, Path], tmp_path: Path) -> None:
    context, config = finished_run

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [*before, sys.executable, "-m", "flowmill.flows.cli", *words, "--root", context.store.root.uri]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    with read_only(Path(context.store.root.uri)) as before:
        for line in filter(lambda each: isinstance(each, str), READING):
            arguments = [word.format(out=tmp_path, config=config) for word in line.split() if "e00001" not in word]
            arguments = [word for word in arguments if word != "--sample"]
            done = run(*arguments)
            assert done.returncode == 0, done.stderr
        for line in ("stage score --run small --epoch 1 --force --trust-store", "store gc --delete", "store repair"):
            done = run(*line.split())
            assert done.returncode == 1
            assert f"flowmill: store.root '{context.store.root.uri}' cannot be used: Read-only" in done.stderr
            assert "Traceback" not in done.stderr
