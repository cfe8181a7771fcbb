"""Every server that a command starts is behind the guard: found by what listens while the command runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prefect_dask import DaskTaskRunner

from flowmill.configs.addresses import is_loopback
from flowmill.configs.execution import ExecutionSection
from flowmill.flows.server import prefect_command, prefect_environment
from flowmill.tasks.execution.launch import stop_trees
from flowmill.tasks.execution.runners import Dask
from tests.conftest import ROOT
from tests.support.listening import Listener, lets_in, listeners, served
from tests.support.s3 import free_port

#: Modules that start processes or listen, and what of this file, or of another, holds what listens there.
STARTS = {
    "flows/cli/http_server.py": "test_servers_answer_no_foreign_page",
    "flows/cli/ui.py": "test_servers_answer_no_foreign_page",
    "flows/cli/view.py": "test_servers_answer_no_foreign_page",
    "flows/cli/worker.py": "test_a_worker_serves_no_http",
    "flows/server.py": "test_a_run_answers_no_foreign_page",
    "flows/sweep.py": "starts 'flowmill run'",
    "tasks/execution/launch.py": "test_a_run_answers_no_foreign_page",
    "tasks/execution/rendezvous.py": "test_a_run_answers_no_foreign_page",
    "tasks/execution/runners.py": "test_dask_nodes_listen_on_loopback",
    "tasks/tracking/descriptions.py": "starts git",
}
_STARTING = re.compile(
    r"Popen\(|subprocess\.(run|call|check)|os\.(exec|spawn|posix)|import uvicorn|\.listen\(|HTTPServer"
    r"|task_runner\.client"
)
COMMANDS = {
    "view": ["view", "--root", "{root}", "--port", "{port}"],
    "ui": ["ui", "--root", "{root}", "--mlflow-port", "{port}", "--prefect-port", "{other}"],
    "serve-reward": ["serve-reward", "tests.support.rewards:Constant", "--port", "{port}"],
}


def test_every_module_that_starts_something_is_listed() -> None:
    places = [
        path for name in ("flows", "tasks", "flowmill", "models", "storage") for path in (ROOT / name).rglob("*.py")
    ]
    found = {path.relative_to(ROOT).as_posix() for path in places if _STARTING.search(path.read_text())}
    assert found == set(STARTS)


def test_prefect_allows_no_other_origin() -> None:
    assert "flowmill.flows.guard:prefect_app" in prefect_command(4200)
    assert "*" not in prefect_environment(4200)["PREFECT_SERVER_CORS_ALLOWED_ORIGINS"]
    assert prefect_environment(4200)["PYTHONPATH"].split(os.pathsep)[0] == str(ROOT)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_servers_answer_no_foreign_page(name: str, tmp_path: Path, prefect_home: Path) -> None:
    (tmp_path / "runs").mkdir()
    # A file of the user's own in the working folder is not imported in place of a library.
    if name == "view":
        (tmp_path / "pandas.py").write_text("raise SystemExit('hidden')")
    ports = {"port": free_port(), "other": free_port()}
    arguments = [each.format(root=tmp_path, **ports) for each in COMMANDS[name]]
    wanted = {each for each in ports.values() if str(each) in arguments}
    with started(arguments, tmp_path, PREFECT_HOME=str(prefect_home)) as process:
        for server in until_answering(process, wanted):
            assert is_loopback(server.ip)
            assert lets_in(server) == []
            # Where Streamlit's page and its server speak to each other.
            assert lets_in(server, "/_stcore/stream") == []
        if name == "view":
            process.terminate()
            process.communicate(timeout=30)


@pytest.mark.campaign
@pytest.mark.slow
def test_a_run_answers_no_foreign_page(config_file: Path, tmp_path: Path, prefect_home: Path) -> None:
    """Prefect's temporary server; the ranks, their agent and Dask's nodes listen on loopback."""
    settings = ["run.epochs=1", "execution.processes=2", "execution.runner={name: dask}"]
    arguments = ["run", str(config_file), *(word for each in settings for word in ("--set", each))]
    seen: set[Listener] = set()
    servers: list[Listener] = []
    with started(arguments, tmp_path, PREFECT_HOME=str(prefect_home)) as process:
        while process.poll() is None:
            new = listeners(process.pid) - seen
            seen |= new
            for server in served(each for each in new if "prefect_app" in each.command):
                servers.append(server)
                assert lets_in(server) == []
            time.sleep(0.5)
        said = process.communicate()[0]
    assert process.returncode == 0, said
    assert all(is_loopback(each.ip) for each in seen), seen
    assert len(servers) == 1, servers
    for kind in ("tasks/execution/agent.py", "tasks/execution/rank.py", "multiprocessing.spawn"):
        assert any(kind in each.command for each in seen), kind


@pytest.mark.slow
def test_dask_nodes_listen_on_loopback() -> None:
    """The scheduler, in this process, and its workers."""
    runner = Dask()
    with DaskTaskRunner(**runner.arguments(ExecutionSection())) as task_runner:
        before = listeners(os.getpid())
        runner.connect(task_runner)
        task_runner.client.wait_for_workers(1, timeout=60)
        assert task_runner.client.submit(sum, [1, 2]).result() == 3
        new = listeners(os.getpid()) - before
        assert len(new) >= 2
        assert all(is_loopback(each.ip) for each in new), new


@pytest.mark.slow
def test_a_worker_serves_no_http(tmp_path: Path, prefect_server: str) -> None:
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL, temporary_settings

    pool = f"pool-{tmp_path.name}"
    with (
        started(["worker", "--pool", pool], tmp_path, PREFECT_API_URL=prefect_server) as process,
        temporary_settings({PREFECT_API_URL: prefect_server}),
        get_client(sync_client=True) as client,
    ):
        deadline = time.monotonic() + 120
        while not any(each.name == pool for each in client.read_work_pools()) and time.monotonic() < deadline:
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.3)
        time.sleep(1)
        assert process.poll() is None
        found = listeners(process.pid)
        assert all(is_loopback(each.ip) for each in found)
        assert served(found) == []


@contextmanager
def started(arguments: list[str], folder: Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Run a command with its own Prefect, and stop it in the end."""
    variables = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    process = subprocess.Popen(
        [sys.executable, "-m", "flowmill.flows.cli", *arguments],
        cwd=folder,
        env={**variables, "PYTHONPATH": str(ROOT), **environment},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        stop_trees([process], grace=10)


def until_answering(process: subprocess.Popen[str], ports: set[int]) -> list[Listener]:
    """Return the servers of a command once all ports answer."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[0]
        found = served(listeners(process.pid))
        if ports <= {each.port for each in found}:
            return found
        time.sleep(0.3)
    raise AssertionError(f"{ports} do not all answer")
