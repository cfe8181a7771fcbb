"""What the end of a run suggests works on the store of the run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flowmill.flows.cli import app
from flowmill.flows.cli.summary import print_summary
from flowmill.storage.artifacts.lineage import RunFolder
from flowmill.tasks.metrics.describe import describe_result
from flowmill.tasks.runs.context import RunContext


def test_the_end_of_a_run_names_its_store(
    finished_run: tuple[RunContext, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    context, _ = finished_run
    result, root = describe_result(context), context.store.root.uri
    first, last = result["evaluations"]["0"], result["evaluations"]["1"]
    worst = {split: {slot: {**each, "mean": -1.0} for slot, each in of.items()} for split, of in first.items()}
    result["evaluations"] = {"0": worst, "1": last, "2": worst}
    note = {"mlflow_run_id": "1"}
    monkeypatch.setattr(RunFolder, "newest", lambda self, series: note if series == "tracking" else None)
    monkeypatch.chdir(tmp_path)

    def printed(uri: str | None = None) -> str:
        tracking = context.config.tracking.model_copy(update={"uri": uri})
        config = context.config.model_copy(update={"tracking": tracking})
        print_summary(RunContext(context.store, config, context.run), result, quiet=False)
        return " ".join(capsys.readouterr().out.split())

    said = printed()
    assert f"flowmill ui --root {root}" in said
    assert "flowmill ui" not in printed("sqlite:///my.db"), "it serves the store's own database alone"
    copying = re.search(r"To copy its model: flowmill (export .*? --root \S+)", said)
    assert copying is not None
    done = CliRunner().invoke(app, shlex.split(copying[1].replace("small@best", "small")))
    assert done.exit_code == 0, done.output
    assert (tmp_path / "DIR").is_dir()
    monkeypatch.setenv("FLOWMILL_ROOT", root)
    assert "--root" not in printed()
