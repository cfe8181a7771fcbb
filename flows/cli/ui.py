"""``flowmill ui``: the MLflow and Prefect UIs, on the loopback interface only."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Annotated

import typer

from flowmill.configs.errors import FlowmillError
from flowmill.flows.cli.error_reporting import say
from flowmill.flows.cli.options import Root
from flowmill.flows.console import console
from flowmill.flows.environment import existing_root

_HOST = "127.0.0.1"


def ui_command(
    *,
    root: Root = None,
    mlflow_port: Annotated[int, typer.Option(help="Port of the MLflow UI.")] = 5000,
    prefect_port: Annotated[int, typer.Option(help="Port of the Prefect UI.")] = 4200,
) -> None:
    """Start both servers, print their addresses, and stop both on Ctrl-C."""
    place = existing_root(root)
    say(f"starting MLflow and Prefect for {place}")
    from flowmill.flows.server import check_home, prefect_command, prefect_environment
    from flowmill.storage.artifacts.commit import ArtifactStore
    from flowmill.tasks.execution.launch import stop_trees
    from flowmill.tasks.execution.parent_death import die_with_parent
    from flowmill.tasks.tracking.locations import runs_page, served_at

    check_home()
    uri = ArtifactStore(place).root.uri
    mlflow = _mlflow_command(uri, mlflow_port)
    prefect = [*prefect_command(prefect_port), "--log-level", "warning"]
    environment = prefect_environment(prefect_port) | {
        # Background jobs of the MLflow server cost two gigabytes and are not used here.
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        # MLflow warns of its own libraries.
        "PYTHONWARNINGS": "ignore",
        "MLFLOW_SERVER_ALLOWED_HOSTS": ",".join(f"{name}:*" for name in ("127.0.0.1", "localhost", "[[]::1]")),
        # Without it the UI would call port 4200.
        "PREFECT_SERVER_UI_API_URL": f"http://{_HOST}:{prefect_port}/api",
    }
    address = f"http://{_HOST}:{mlflow_port}"
    servers = {
        f"MLflow   {address}{runs_page(uri)}": mlflow,
        f"Prefect  http://{_HOST}:{prefect_port}": prefect,
    }
    processes = [
        subprocess.Popen(command, env=environment, text=True, start_new_session=True, preexec_fn=die_with_parent)
        for command in servers.values()
    ]
    for line in servers:
        console.print(line)
    console.print("Ctrl-C stops both.")
    try:
        with served_at(uri, address):
            while all(process.poll() is None for process in processes):
                time.sleep(0.5)
        raise FlowmillError(
            "A UI server ended; its own message is above. Is the port taken? See --help for other ports."
        )
    finally:
        for process in processes:
            stop_trees([process], grace=10)


def _mlflow_command(uri: str, port: int) -> list[str]:
    from flowmill.tasks.tracking.locations import ARTIFACTS, tracking_folder, tracking_uri

    return [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        # No other host name, which could be that of a page elsewhere.
        "--allowed-hosts",
        "127.0.0.1:*,localhost:*",
        "--host",
        _HOST,
        "--port",
        str(port),
        "--workers",
        "1",
        # A line per request would scroll the addresses away.
        "--uvicorn-opts",
        "--log-level warning",
        "--backend-store-uri",
        tracking_uri(uri, None),
        "--artifacts-destination",
        (tracking_folder(uri) / ARTIFACTS).absolute().as_uri(),
        # Artifact locations stay valid when the folder moves.
        "--default-artifact-root",
        "mlflow-artifacts:/",
    ]
