"""Prefect for real: the server imports, and a scheduled deployment is carried out by a worker."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import yaml

from configs.schema import RunConfig
from tasks.execution.launch import stop_trees
from tests.conftest import ROOT, prepare

pytestmark = pytest.mark.slow


def test_the_server_imports_with_the_declared_dependencies() -> None:
    code = "import prefect.server.api.server as s; s.create_app()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr


def test_deployments_name_flows_and_parameters_that_exist() -> None:
    import inspect

    from prefect.flows import load_flow_from_entrypoint

    for deployment in yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]:
        flow = load_flow_from_entrypoint(str(ROOT / deployment["entrypoint"]))
        assert set(deployment["parameters"]) <= set(inspect.signature(flow.fn).parameters)


@pytest.fixture
def scheduling_server(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A server with its scheduler, and the environment that names it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "PREFECT_HOME": str(tmp_path / "prefect"), "PYTHONPATH": str(ROOT)}
    environment["PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS"] = "2"
    command = [
        sys.executable,
        "-m",
        "prefect",
        "server",
        "start",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--no-ui",
    ]
    server = subprocess.Popen(
        command,
        env=environment,
        text=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    environment["PREFECT_API_URL"] = f"http://127.0.0.1:{port}/api"
    try:
        from flows.server import _answers

        wait_until(lambda: _answers(f"{environment['PREFECT_API_URL']}/health"), 120)
        yield environment
    finally:
        stop_trees([server], grace=10)


def wait_until(condition: Callable[[], bool], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.5)


def test_an_interval_schedule_is_carried_out_by_a_worker(
    scheduling_server: dict[str, str], make_config: Callable[..., RunConfig]
) -> None:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import DeploymentScheduleCreate, WorkPoolCreate
    from prefect.client.schemas.schedules import IntervalSchedule
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from flows.stages import evaluate

    context = prepare(make_config())
    pool, api = "test-pool", scheduling_server["PREFECT_API_URL"]
    with temporary_settings({PREFECT_API_URL: api}), get_client(sync_client=True) as client:
        client.create_work_pool(WorkPoolCreate(name=pool, type="process"))
        flow_id = client.create_flow(evaluate)
        deployment = client.create_deployment(
            flow_id,
            name="every-few-seconds",
            entrypoint="flows/stages.py:evaluate",
            path=str(ROOT),
            parameters={"run": "small", "root": context.store.root.uri},
            schedules=[
                DeploymentScheduleCreate(schedule=IntervalSchedule(interval=timedelta(seconds=15)), active=True)
            ],
            work_pool_name=pool,
            job_variables={"env": {"PYTHONPATH": str(ROOT)}, "working_dir": str(ROOT)},
        )
        command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool, "--type", "process"]
        worker = subprocess.Popen(
            command,
            env=scheduling_server,
            text=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            wait_until(lambda: completed(client, deployment), 240)
        finally:
            stop_trees([worker], grace=10)
    context.run.refresh()
    manifest = context.store.require(context.chain.require(0, "evaluate").ref)
    assert manifest.rows == 8


def completed(client: object, deployment: object) -> bool:
    """Return whether a run of the deployment that the scheduler made has completed."""
    from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterId

    runs = client.read_flow_runs(  # type: ignore[attr-defined]
        deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[deployment]))
    )
    failed = [run.state.message for run in runs if run.state and (run.state.is_failed() or run.state.is_crashed())]
    assert not failed, failed
    return any(run.auto_scheduled and run.state and run.state.is_completed() for run in runs)
