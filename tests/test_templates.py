"""The cluster templates of the docs: what their scripts make of a cluster's variables is a run that can be started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from flowmill.configs.load import load_config
from flowmill.tasks.checks.check import check_config
from flowmill.tasks.execution.launchers import Program, make_launcher
from tests.conftest import ROOT

TEMPLATES = ROOT / "docs" / "templates"
CONFIG, STORE = str(ROOT / "configs" / "flux1_dev.yaml"), "s3://bucket/store"
POD = "pod/flowmill-node-0-1-abcde"
STUBS = {
    "flowmill": f"#!{sys.executable}\nimport json, os, sys\njson.dump(sys.argv[1:], open(os.environ['TOLD'], 'w'))\n",
    "kubectl": f'#!/bin/bash\n[ "$1" = get ] && echo {POD} || true\n',
    "ssh": "#!/bin/bash\n",
    "hostname": "#!/bin/bash\necho 10.0.0.1\n",
}


def script_of(name: str) -> str:
    if name == "slurm.sh":
        return (TEMPLATES / name).read_text()
    data = yaml.safe_load((TEMPLATES / name).read_text())
    script: str = data["run"] if "run" in data else data["spec"]["trainer"]["args"][0]
    return script.replace("~/flowmill/bin/flowmill", "flowmill")


@pytest.mark.parametrize(
    ("name", "variables", "starts"),
    [
        (
            "slurm.sh",
            {"SLURM_NNODES": "2", "SLURMD_NODENAME": "node1", "SLURM_CPUS_PER_TASK": "64"},
            [["srun", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=64"]],
        ),
        (
            "skypilot.yaml",
            {
                "SKYPILOT_NODE_RANK": "0",
                "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
                "SKYPILOT_NUM_NODES": "2",
                "SKYPILOT_NUM_GPUS_PER_NODE": "8",
            },
            [["env"], ["ssh", "-o"]],
        ),
        (
            "trainjob.yaml",
            {"JOB_COMPLETION_INDEX": "0"},
            [["env"], ["kubectl", "exec", "-i", "pod/flowmill-node-0-1-abcde"]],
        ),
    ],
)
def test_a_template_starts_a_run_of_sixteen_processes(
    tmp_path: Path, name: str, variables: dict[str, str], starts: list[list[str]]
) -> None:
    for stub, body in STUBS.items():
        (tmp_path / stub).write_text(body)
        (tmp_path / stub).chmod(0o755)
    reported = tmp_path / "told.json"
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "TOLD": str(reported),
        **variables,
    }
    command = ["bash", "-c", script_of(name), name, CONFIG, STORE]
    subprocess.run(command, env={**environment, "CONFIG": CONFIG, "ROOT": STORE}, check=True, timeout=60)
    verb, config, *rest = json.loads(reported.read_text())
    assert (verb, config, rest[:2]) == ("run", CONFIG, ["--root", STORE])
    assert rest[2::2] == ["--set"] * len(rest[3::2])
    found = load_config(config, rest[3::2])
    check_config(found, rewards=False)
    assert found.execution.ranks == 16
    program = Program(module="m", processes=found.execution.processes, nodes=found.execution.nodes)
    commands = make_launcher(found.execution).commands(program, tmp_path)
    assert [made[: len(start)] for made, start in zip(commands, starts, strict=True)] == starts
