"""``flowmill view``: the explorer, only on the loopback interface and behind the guard."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from typing import Annotated, NoReturn

import typer

from flowmill.configs.extras import require_extra
from flowmill.flows.cli.options import Root, TrustStore
from flowmill.flows.console import console
from flowmill.flows.environment import existing_root

_HOST = "127.0.0.1"


def view_command(
    run: Annotated[str | None, typer.Argument(help="Run to begin with.", metavar="[RUN]")] = None,
    *,
    root: Root = None,
    port: Annotated[int, typer.Option("--port", help="Port on the loopback interface.")] = 8501,
    trust_store: TrustStore = False,
) -> NoReturn:
    """Replace this process with Streamlit's server of the explorer's page."""
    from flowmill.storage.artifacts.commit import ArtifactStore
    from flowmill.tasks.runs.opening import require_run

    uri = existing_root(root)
    require_extra("view", "streamlit", label="flowmill view")
    if run is not None:
        require_run(ArtifactStore(uri), run)
    server = find_spec("flowmill.explorer.server")
    assert server is not None
    settings = {
        "server.address": _HOST,
        "server.port": str(port),
        "server.headless": "true",
        # No telemetry.
        "browser.gatherUsageStats": "false",
        "server.fileWatcherType": "none",
        "client.toolbarMode": "minimal",
    }
    options = [f"--{name}={value}" for name, value in settings.items()]
    console.print(f"http://{_HOST}:{port}   Ctrl-C stops it.")
    sys.stdout.flush()
    # Files in the user's working directory must not shadow the server's libraries.
    os.environ["PYTHONSAFEPATH"] = "1"
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    arguments = [uri, run or "", "trust" if trust_store else ""]
    os.execv(sys.executable, [sys.executable, "-m", "streamlit", "run", str(server.origin), *options, "--", *arguments])
