"""Disks that are full, fail, or take half of what they are given: named, nothing lost, the same bytes in the end."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.maintenance.verify import verify_store
from tools.chaos.kills import ROOT, digest

pytestmark = pytest.mark.campaign
_SOURCE = ROOT / "tools" / "chaos" / "disk.c"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("no C compiler, or no LD_PRELOAD, to make a disk fail with")
    built = tmp_path_factory.mktemp("disk") / "disk.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(built), str(_SOURCE), "-ldl"], check=True)
    return built


def run(config: Path, root: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run in a process of its own: what is loaded first cannot be loaded by a fork."""
    # MLflow's database is SQLite's affair, which has its own tests; here it lies elsewhere.
    tracking = f"tracking.uri=sqlite:///{root.parent / (root.name + '.db')}"
    command = [sys.executable, "-m", "flowmill.flows.cli", "run", str(config), "--root", str(root), "--set", tracking]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize(
    ("kind", "said"),
    [("short", ""), ("eio", "Input/output error"), ("enospc", "No space left on device. Committed data stays")],
)
def test_a_failing_disk_loses_nothing(
    config_file: Path, library: Path, prefect_server: str, tmp_path: Path, kind: str, said: str
) -> None:
    """Each run comes further than the one before: faults become rarer."""
    plain = {**os.environ, "PREFECT_API_URL": prefect_server}
    root, whole = tmp_path / "failing", tmp_path / "whole"
    failing = {**plain, "LD_PRELOAD": str(library), "FLOWMILL_DISK_BELOW": str(root)}
    failures = []
    for every in (100, 200, 400, 800, 1600, 3200):
        done = run(config_file, root, {**failing, "FLOWMILL_DISK": kind if kind == "short" else f"{kind}:{every}"})
        if done.returncode == 0:
            break
        assert "Traceback" not in done.stderr + done.stdout, done.stderr
        failures.append(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, failures
    assert all(said in message for message in failures), failures
    assert bool(failures) == (kind != "short")
    assert run(config_file, whole, plain).returncode == 0
    assert digest(str(root), "small", plain) == digest(str(whole), "small", plain)
    assert verify_store(ArtifactStore(str(root)), deep=True)["problems"] == []


def test_a_full_disk_is_named_and_room_is_enough_to_go_on(
    config_file: Path, prefect_server: str, tmp_path: Path
) -> None:
    small = tmp_path / "mounted"
    small.mkdir()
    mounted = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(small)]
    if subprocess.run(mounted, capture_output=True, check=False).returncode != 0:
        pytest.skip("this user may not mount a file system")
    environment = {**os.environ, "PREFECT_API_URL": prefect_server}
    try:
        done = run(config_file, small / "store", environment)
        assert done.returncode == 1
        assert f"'{small / 'store'}': No space left on device. Committed data stays: free space" in done.stderr
        subprocess.run(["mount", "-o", "remount,size=500m", str(small)], check=True)
        assert run(config_file, small / "store", environment).returncode == 0
        assert run(config_file, tmp_path / "whole", environment).returncode == 0
        found = [digest(str(root), "small", environment) for root in (small / "store", tmp_path / "whole")]
        assert found[0] == found[1]
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)
