"""``flowmill deploy`` and ``flowmill worker``."""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

from configs.errors import ConfigError
from flows.console import console
from flows.deployments import DeployRequest, deploy


def deploy_command(request: DeployRequest) -> None:
    """Make deployments and say how they go on.

    Raises:
        ConfigError: see ``deploy``.
    """
    for name in deploy(request):
        console.print(name, markup=False)
    console.print(f"carried out by: flowmill worker --pool {request.pool} --type {request.kind}", markup=False)


def worker_command(pool: str, *, kind: str, limit: int | None) -> NoReturn:
    """Become a worker of Prefect's.

    Raises:
        ConfigError: no server is named.
    """
    from prefect.settings import get_current_settings

    if not get_current_settings().api.url:
        raise ConfigError("A worker asks a Prefect server for work, and PREFECT_API_URL names none. Set it.")
    # What a shell starts in the background has Ctrl-C ignored, and a worker that inherits this does not end by SIGTERM.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # On a terminal warnings are enough; here the UI shows what is logged.
    os.environ["PREFECT_LOGGING_LEVEL"] = "INFO"
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool, "--type", kind]
    os.execv(sys.executable, [*command, *([] if limit is None else ["--limit", str(limit)])])
