"""Equal work, equal bytes: every artifact kind of every family, of a new process and of one that did much before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flowmill.configs.load import load_config
from tools.chaos.fresh import made
from tools.chaos.kills import ROOT

pytestmark = [pytest.mark.campaign, pytest.mark.xdist_group("one long process")]
PRESETS = sorted((ROOT / "configs").glob("tiny_*.yaml"))
KINDS = {
    "bases",
    "embeddings",
    "prompts",
    "policies",
    "trajectories",
    "rewards",
    "advantages",
    "evaluations",
    "exports",
}


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.stem)
def test_a_long_process_makes_the_bytes_of_a_new_one(preset: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.chaos.fresh", str(preset), str(tmp_path / "new")]
    done = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    new = json.loads(done.stdout.splitlines()[-1])
    # The first family of this process has had another one before it too.
    if preset == PRESETS[0]:
        made(str(PRESETS[-1]), str(tmp_path / "before"))
    assert made(str(preset), str(tmp_path / "long")) == new
    drawn = set() if load_config(preset).render is None else {"embeddings", "renders"}
    assert {artifact.split("/")[0] for artifact in new} == KINDS ^ drawn
