"""``flowmill worker``."""

from __future__ import annotations

import os
import signal
import sys
from typing import Annotated, Literal, NoReturn

import typer


def worker_command(
    *,
    pool: Annotated[str, typer.Option("--pool", help="Work pool.", metavar="NAME")] = "flowmill",
    kind: Annotated[
        Literal["process", "docker", "kubernetes"], typer.Option("--type", help="Type of the pool, if it is created.")
    ] = "process",
    limit: Annotated[int | None, typer.Option("--limit", help="Flow runs at a time.", min=1, metavar="N")] = None,
) -> NoReturn:
    """Replace this process with a Prefect worker.

    Raises:
        ConfigError: no server is named, or it does not answer.
    """
    from flows.api import named_server

    with named_server() as client:
        client.read_work_pools(limit=1)
    # Shells start background processes with SIGINT ignored, and a worker that inherits this does not stop on SIGTERM.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Other commands log only warnings; Prefect's UI shows a worker's log.
    os.environ["PREFECT_LOGGING_LEVEL"] = "INFO"
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool, "--type", kind]
    os.execv(sys.executable, [*command, *([] if limit is None else ["--limit", str(limit)])])
