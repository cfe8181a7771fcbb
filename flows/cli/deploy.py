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
from flows.deployments import DeployRequest, carry_out, every_deployment, plan, workers


def deploy_command(request: DeployRequest, *, sure: bool) -> None:
    """Make or change deployments, after asking where somebody's choice would be lost, and say how they go on.

    Args:
        request: What is wanted.
        sure: Ask nothing.

    Raises:
        ConfigError: see ``plan`` and ``carry_out``; or something would have to be asked, and nobody is there.
        CancelledError: the answer was no.
    """
    planned = plan(request)
    for each in planned.changes:
        console.print(str(each))
    for name in planned.left_out:
        console.print(f"{name} is left out: it trains from a config. Name one with --config.")
    if not sure:
        _ask([each for each in planned.changes if each.asks])
    rows = carry_out(planned)
    _print(rows)
    for line in workers(rows):
        console.print(f"carried out by: {line}")


def list_command() -> None:
    """Print all deployments of flowmill's flows on the server.

    Raises:
        ConfigError: no server is named, or it does not answer.
    """
    rows = every_deployment()
    if rows:
        _print(rows)
    else:
        console.print("There are no deployments. Make some with: flowmill deploy --all --config CONFIG")


def _ask(lost: Sequence[Change]) -> None:
    """Ask whether what somebody chose may be replaced.

    Raises:
        ConfigError: nobody is there to answer.
        CancelledError: the answer was no.
    """
    if not lost:
        return
    if not sys.stdin.isatty():
        told = "; ".join(map(str, lost))
        raise ConfigError(
            f"This would replace what is set on the server, and nothing is changed yet: {told}. Give --yes to have it "
            "so, or --name NAME for a deployment beside it."
        )
    if not typer.confirm("Replace what is set there?"):
        raise CancelledError("Nothing was changed. --name NAME makes a deployment beside the one that is there.")


def _print(rows: Sequence[Listed]) -> None:
    table = Table(box=None, pad_edge=False)
    for title in ("deployment", "run", "config", "schedule", "next start"):
        table.add_column(title)
    for row in rows:
        table.add_row(row.name, row.run, row.config, row.schedule, row.next_start)
    print_table(table, cut=("config", "schedule"))


def worker_command(pool: str, *, kind: str, limit: int | None) -> NoReturn:
    """Become a worker of Prefect's.

    Raises:
        ConfigError: no server is named, or it does not answer.
    """
    with named_server() as client:
        client.read_work_pools(limit=1)
    # What a shell starts in the background has Ctrl-C ignored, and a worker that inherits this does not end by SIGTERM.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # On a terminal warnings are enough; here the UI shows what is logged.
    os.environ["PREFECT_LOGGING_LEVEL"] = "INFO"
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool, "--type", kind]
    os.execv(sys.executable, [*command, *([] if limit is None else ["--limit", str(limit)])])
