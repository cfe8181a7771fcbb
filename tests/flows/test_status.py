"""``flowmill status`` of a store with a run that cannot be read."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from flowmill.configs.errors import ConfigError
from flowmill.flows.cli import app
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runs.opening import begin_run
from flowmill.tasks.runs.state import note_state
from tests.conftest import ConfigFactory
from tests.support.inside import prepare


def test_a_damaged_record_of_one_run_does_not_hide_the_others(make_config: ConfigFactory, tmp_path: Path) -> None:
    context, root = prepare(make_config()), str(tmp_path / "store")
    note_state(context, "stopped")
    begin_run(make_config("run.name=other"))
    top = Path(root, "runs", "small")
    records = [path for path in sorted(top.rglob("*.json")) if "copies" not in path.parts]
    assert {path.relative_to(top).parts[0] for path in records} == {"run.json", "configs", "needs", "states", "lineage"}
    for path in records:
        before = path.read_bytes()
        for damage in (b"{}", b"junk", before[: len(before) // 2]):
            path.write_bytes(damage)
            done = CliRunner().invoke(app, ["status", "--root", root, "--json"])
            assert done.exit_code == 0, done.output
            states = {run["run"]: run["state"] for run in json.loads(done.stdout)}
            assert states["other"] == "not started"
            assert states["small"].startswith(f"cannot be read: {path.relative_to(root)} ")
            assert "'flowmill store repair' sets it aside" in states["small"]
        assert CliRunner().invoke(app, ["status", "--root", root, "--check"]).exit_code == 1
        path.write_bytes(before)
    done = CliRunner().invoke(app, ["status", "small", "--root", root, "--why", "score@\N{SUPERSCRIPT TWO}"])
    assert isinstance(done.exception, ConfigError), "a digit that is no decimal number"


def test_json_alone_is_on_standard_output(finished_run: tuple[RunContext, Path], tmp_path: Path) -> None:
    root = ["--root", finished_run[0].store.root.uri]
    why = ["status", "small", "--why", "score@1", *root]
    ((stage, reasons),) = json.loads(CliRunner().invoke(app, [*why, "--json"]).stdout).items()
    assert stage == "score[jpeg_compressibility]@1"
    assert reasons == CliRunner().invoke(app, why).stdout.splitlines()[1:]
    refused = CliRunner().invoke(app, [*why, "--check"])
    assert "leave out --check" in str(refused.exception)
    images = tmp_path / "both.html"
    done = CliRunner().invoke(app, ["diff", "small", "small", "--json", "--images", str(images), *root])
    assert json.loads(done.stdout)["runs"] == ["small", "small"]
    assert done.stderr == f"report: {images}\n"
