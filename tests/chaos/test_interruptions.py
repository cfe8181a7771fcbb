"""kill -9, Ctrl-C, SIGTERM and cancellation: nothing is lost, nothing changes, no process stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml

from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.maintenance.verify import verify_store
from flowmill.tasks.runs.opening import open_run
from flowmill.tasks.tracking.client import open_client
from tools.chaos.kills import ROOT, killed, orphans, records, start, uninterrupted, victims

pytestmark = pytest.mark.slow


@pytest.fixture
def environment(prefect_server: str, tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "PREFECT_API_URL": prefect_server, "FLOWMILL_TEST": str(tmp_path)}


@pytest.fixture
def longer(config_file: Path) -> str:
    """Three epochs with a checkpoint after every optimizer update."""
    data = yaml.safe_load(config_file.read_text())
    data["run"]["epochs"] = 3
    data["optimize"]["updates_per_epoch"] = 4
    data["execution"]["checkpoint_every"] = 1
    config_file.write_text(yaml.safe_dump(data))
    return str(config_file)


def wait_until(condition: Callable[[], bool], timeout: float = 120) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


def begun(longer: str, root: str, environment: dict[str, str], *, fork: str = "") -> subprocess.Popen[bytes]:
    """Start a run and wait until its first epoch has begun to commit."""
    process = start(["run", longer, "--root", root], environment, fork=fork)
    wait_until(lambda: bool(list(Path(root).glob("trajectories/*/_shards/*.json"))) or process.poll() is not None)
    assert process.poll() is None
    return process


def tracked_state(root: str) -> str:
    """Return the state of the run in MLflow."""
    note = open_run(root, "small", reads=True).run.newest("tracking")
    assert note is not None
    return str(open_client(root, None).get_run(note["mlflow_run_id"]).info.status)


def test_kills_change_nothing(longer: str, tmp_path: Path, environment: dict[str, str], preloaded: str) -> None:
    expected = uninterrupted(longer, str(tmp_path / "whole"), environment, fork=preloaded)
    outcome = killed(longer, str(tmp_path / "killed"), environment, kills=4, seed=1, fork=preloaded)
    assert outcome.kills == 4
    assert outcome.digest == expected
    assert verify_store(ArtifactStore(str(tmp_path / "killed")), deep=True)["problems"] == []
    assert orphans(str(tmp_path)) == []
    assert [entry for entry in os.listdir(tmp_path / "killed" / ".staging") if entry.endswith(".tmp")] == []


@pytest.mark.campaign
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_the_run_and_loses_nothing(
    longer: str, tmp_path: Path, environment: dict[str, str], number: int, code: int
) -> None:
    root = str(tmp_path / "store")
    process = begun(longer, root, environment)
    os.kill(process.pid, number)
    output = process.communicate(timeout=60)[0].decode()
    assert process.returncode == code, output
    assert "Traceback" not in output
    assert orphans(str(tmp_path)) == []
    assert tracked_state(root) == "KILLED"
    done = records(root)
    assert uninterrupted(longer, root, environment) == uninterrupted(longer, str(tmp_path / "whole"), environment)
    assert records(root) > done
    assert tracked_state(root) == "FINISHED"


@pytest.fixture
def alone(environment: dict[str, str], prefect_home: Path) -> dict[str, str]:
    """The environment of runs with a server of their own."""
    return {name: value for name, value in environment.items() if name != "PREFECT_API_URL"} | {
        "PREFECT_HOME": str(prefect_home)
    }


def test_the_temporary_server_dies_with_what_started_it(tmp_path: Path, alone: dict[str, str]) -> None:
    code = (
        "import time; from flowmill.flows.server import LocalApi; print(LocalApi().wait(), flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=alone, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline().startswith(b"http://127.0.0.1:")
    assert len(orphans(str(tmp_path))) >= 2
    process.kill()
    process.communicate()
    wait_until(lambda: orphans(str(tmp_path)) == [], timeout=30)


@pytest.mark.campaign
def test_the_temporary_server_dies_with_a_killed_run(longer: str, tmp_path: Path, alone: dict[str, str]) -> None:
    process = begun(longer, str(tmp_path / "store"), alone)
    assert len(orphans(str(tmp_path))) >= 2
    process.kill()
    process.wait()
    wait_until(lambda: orphans(str(tmp_path)) == [], timeout=30)


@pytest.mark.campaign
def test_a_killed_temporary_server_is_started_again(longer: str, tmp_path: Path, alone: dict[str, str]) -> None:
    process = begun(longer, str(tmp_path / "store"), alone)
    (server,) = [
        child for child in psutil.Process(process.pid).children() if "flowmill.flows.guard" in str(child.cmdline())
    ]
    server.kill()
    said = process.communicate(timeout=300)[0].decode()
    assert process.returncode == 0, said
    assert said.count("Prefect's temporary server ended; it is started again.") == 1
    assert "Traceback" not in said
    wait_until(lambda: orphans(str(tmp_path)) == [], timeout=30)


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.campaign)])
def test_cancelling_in_prefect_stops_the_run(
    longer: str, tmp_path: Path, environment: dict[str, str], preloaded: str, processes: int
) -> None:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName
    from prefect.settings import PREFECT_API_URL, temporary_settings
    from prefect.states import Cancelling

    data = yaml.safe_load(Path(longer).read_text())
    # Other tests have runs on the server meanwhile.
    data["run"] = {"name": f"cancelled-{processes}", "epochs": 50}
    data["execution"]["processes"] = processes
    Path(longer).write_text(yaml.safe_dump(data))
    root = str(tmp_path / "store")
    process = begun(longer, root, environment, fork=preloaded)
    with temporary_settings({PREFECT_API_URL: environment["PREFECT_API_URL"]}), get_client(sync_client=True) as client:
        name = FlowRunFilter(name=FlowRunFilterName(any_=[data["run"]["name"]]))
        (flow_run,) = client.read_flow_runs(flow_run_filter=name)
        client.set_flow_run_state(flow_run.id, Cancelling(), force=True)
        output = process.communicate(timeout=120)[0].decode()
        assert process.returncode == 1, output
        assert "was cancelled" in output
        assert "Traceback" not in output
        state = client.read_flow_run(flow_run.id).state
        assert state is not None
        assert state.is_cancelled()
    assert orphans(str(tmp_path)) == []
    assert verify_store(ArtifactStore(root), deep=True)["problems"] == []


@pytest.mark.campaign
def test_a_second_process_on_the_same_run_is_refused(
    longer: str, tmp_path: Path, environment: dict[str, str], preloaded: str
) -> None:
    data = yaml.safe_load(Path(longer).read_text())
    data["run"]["epochs"] = 200
    Path(longer).write_text(yaml.safe_dump(data))
    root = str(tmp_path / "store")
    first = begun(longer, root, environment, fork=preloaded)
    second = start(["run", longer, "--root", root], environment, fork=preloaded)
    output = second.communicate(timeout=60)[0].decode()
    assert second.returncode == 1
    assert f"is being executed by another process (pid {first.pid})" in output
    os.kill(first.pid, signal.SIGINT)
    assert first.wait(timeout=60) == 130


@pytest.mark.campaign
@pytest.mark.parametrize("kind", ["group", "parent", "agent", "rank"])
def test_kills_before_the_ranks_have_imported_torch(
    kind: str, longer: str, environment: dict[str, str], tmp_path: Path
) -> None:
    root = str(tmp_path / "store")
    command = ["run", longer, "--root", root, "--quiet", "--set", "execution.processes=2", "--set", "run.epochs=1"]
    process = start(command, environment)

    def young() -> dict[str, list[psutil.Process]]:
        found = victims(process.pid)
        ranks = found.get("rank", [])
        return found if ranks and "libtorch" not in Path(f"/proc/{ranks[0].pid}/maps").read_text() else {}

    found: dict[str, list[psutil.Process]] = {}
    while not found:
        assert process.poll() is None
        found = young()
    for victim in found[kind]:
        victim.kill()
    if kind in ("agent", "rank"):
        said = process.communicate(timeout=300)[0].decode()
        assert process.returncode == 0, said
    else:
        process.communicate(timeout=60)
        wait_until(lambda: not orphans(str(tmp_path)), timeout=20)
        assert start(command, environment).wait(timeout=300) == 0
    assert verify_store(ArtifactStore(root), deep=True)["problems"] == []
