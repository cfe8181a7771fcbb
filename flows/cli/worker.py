"""``flowmill worker``."""

from __future__ import annotations

import os
import signal
import sys
from typing import Annotated, Literal, NoReturn

import typer

from flowmill.flows.console import console


def worker_command(
    *,
    pool: Annotated[str, typer.Option("--pool", help="Work pool.", metavar="NAME")] = "flowmill",
    kind: Annotated[
        Literal["process", "docker", "kubernetes"] | None,
        typer.Option("--type", help="Type of the pool, if it is created; when absent process."),
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", help="Flow runs at a time.", min=1, metavar="N")] = None,
) -> NoReturn:
    """Replace this process with a Prefect worker."""
    from flowmill.flows.deployment_list import redeploy_notes
    from flowmill.flows.deployments import every_deployment, pool_type

    pool_kind = pool_type(pool, kind)
    for line in redeploy_notes([row for row in every_deployment() if row.pool == pool]):
        console.print(line)
    # Shells start background processes with SIGINT ignored, and a worker that inherits this does not stop on SIGTERM.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Other commands log only warnings; Prefect's UI shows a worker's log.
    os.environ["PREFECT_LOGGING_LEVEL"] = "INFO"
    # Files in the working directory must not shadow libraries; flow runs still find the modules there.
    command = [sys.executable, "-P", "-m", "flowmill.flows.worker", "worker", "start", "--pool", pool]
    limited = [] if limit is None else ["--limit", str(limit)]
    os.execv(sys.executable, [*command, "--type", pool_kind, *limited])
