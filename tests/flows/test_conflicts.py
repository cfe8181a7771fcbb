"""A command on a run that another process executes is refused before it imports anything heavy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flowmill.configs.load import load_config
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.tasks.runs.locks import holding
from flowmill.tasks.runs.opening import begin_run
from tests.conftest import ROOT

pytestmark = pytest.mark.slow

_HEAVY = ("torch", "prefect", "mlflow", "diffusers", "transformers")
_WATCHED = f"""
import atexit, json, sys
atexit.register(lambda: print(json.dumps([name for name in {_HEAVY} if name in sys.modules])))
from flowmill.flows.cli import main
main()
"""
COMMANDS = {
    "run": ["run", "CONFIG", "--quiet"],
    "stage": ["stage", "score", "--run", "small", "--epoch", "1", "--root", "STORE", "--quiet"],
    "sweep": ["sweep", "CONFIG", "--name", "small", "--grid", "optimize.learning_rate=0.001", "--quiet"],
}


# One that begins is refused while another begins the same run, too.
@pytest.mark.parametrize(("command", "begun"), [("run", True), ("run", False), ("stage", True), ("sweep", False)])
def test_a_second_command_is_refused_before_anything_heavy(
    config_file: Path, tmp_path: Path, command: str, begun: bool
) -> None:
    config = load_config(config_file)
    name = "small" if command != "sweep" else "small-learning_rate-0.001"
    if begun:
        begin_run(config)
    words = [
        {"CONFIG": str(config_file), "STORE": str(tmp_path / "store")}.get(word, word) for word in COMMANDS[command]
    ]
    with holding(ArtifactStore(config.store), name):
        ended = subprocess.run(
            [sys.executable, "-c", _WATCHED, *words],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
    assert ended.returncode == 1
    assert f"Run '{name}' is being executed by another process (pid {os.getpid()})" in ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1]) == []
