"""``flowmill deploy`` and ``flowmill worker``."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

import typer
from rich.table import Table

from configs.errors import CancelledError, ConfigError
from flows.api import named_server
from flows.console import console, print_table
from flows.deployment_diff import Change
from flows.deployment_list import Listed
from flows.deployments import DeployRequest, apply_plan, every_deployment, plan, workers


def deploy_command(request: DeployRequest, *, sure: bool) -> None:
    """Create or change deployments, after confirmation if a user's setting would be replaced; print their workers.

    Args:
        request: the request.
        sure: skip the confirmation.

    Raises:
        ConfigError: see ``plan`` and ``apply_plan``; or confirmation is needed and standard input is no terminal.
        CancelledError: the user declined.
    """
    planned = plan(request)
    for each in planned.changes:
        console.print(str(each))
    for name in planned.left_out:
        console.print(f"{name} is left out: it trains from a config. Name one with --config.")
    if not sure:
        _ask([each for each in planned.changes if each.asks])
    rows = apply_plan(planned)
    _print(rows)
    for line in workers(rows):
        console.print(f"run the worker: {line}")


def list_command() -> None:
    """Print all deployments of flowmill's flows on the server.

    Raises:
        ConfigError: no server is named, or it does not answer.
    """
    rows = every_deployment()
    if rows:
        _print(rows)
    else:
        console.print("There are no deployments. Create some with: flowmill deploy --all --config CONFIG")


def _ask(lost: Sequence[Change]) -> None:
    """Ask whether to replace a user's settings; raise if the user declines or standard input is no terminal."""
    if not lost:
        return
    if not sys.stdin.isatty():
        listed = "; ".join(map(str, lost))
        raise ConfigError(
            f"This would replace settings on the server, and nothing is changed yet: {listed}. Give --yes to replace "
            "them, or --name NAME for a separate deployment."
        )
    if not typer.confirm("Replace these settings?"):
        raise CancelledError("Nothing was changed. --name NAME creates a separate deployment.")


def _print(rows: Sequence[Listed]) -> None:
    table = Table(box=None, pad_edge=False)
    for title in ("deployment", "run", "config", "schedule", "next start"):
        table.add_column(title)
    for row in rows:
        table.add_row(row.name, row.run, row.config, row.schedule, row.next_start)
    print_table(table, cut=("config", "schedule"))


def worker_command(pool: str, *, kind: str, limit: int | None) -> NoReturn:
    """Replace this process with a Prefect worker.

    Raises:
        ConfigError: no server is named, or it does not answer.
    """
    with named_server() as client:
        client.read_work_pools(limit=1)
    # Shells start background processes with SIGINT ignored, and a worker that inherits this does not stop on SIGTERM.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Other commands log only warnings; Prefect's UI shows a worker's log.
    os.environ["PREFECT_LOGGING_LEVEL"] = "INFO"
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool, "--type", kind]
    os.execv(sys.executable, [*command, *([] if limit is None else ["--limit", str(limit)])])
