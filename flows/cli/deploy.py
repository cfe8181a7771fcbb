"""``flowmill deploy``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from flowmill.configs.errors import CancelledError, ConfigError
from flowmill.flows.cli.error_reporting import say
from flowmill.flows.cli.options import Root
from flowmill.flows.console import console, print_table
from flowmill.flows.requests import DeployRequest

if TYPE_CHECKING:
    from flowmill.flows.deployment_diff import Change
    from flowmill.flows.deployment_list import Listed
    from flowmill.flows.deployments import DeploymentPlan


def deploy_command(
    request: DeployRequest,
    *,
    everything: Annotated[bool, typer.Option("--all", help="All deployments.")] = False,
    shown: Annotated[bool, typer.Option("--list", help="List the deployments, and change nothing.")] = False,
    config: Annotated[str | None, typer.Option("--config", help="Config or preset, for pipeline.")] = None,
    run: Annotated[str | None, typer.Option("--run", help="Run, for all other flows.", metavar="RUN")] = None,
    root: Root = None,
    advance: Annotated[
        int | None, typer.Option("--advance", help="Epochs to train each time, for pipeline and continue.", min=1)
    ] = None,
    sure: Annotated[bool, typer.Option("--yes", help="Replace settings on the server without asking.")] = False,
) -> None:
    """Create or change deployments, or list them."""
    options = {"config": config, "run": run, "root": root, "advance": advance}
    parameters = {field: value for field, value in options.items() if value is not None}
    chosen = everything + bool(request.only) + shown
    slots_alone = not (chosen or parameters) and request == DeployRequest(gpu_slots=request.gpu_slots)
    if chosen != 1 and (request.gpu_slots is None or not slots_alone):
        raise ConfigError(
            "Say which deployments: --all, or --only FLOW, which may be given again; --list shows those that exist. "
            "Only --gpu-slots N may stand alone."
        )
    if shown and (parameters or sure or request != DeployRequest()):
        raise ConfigError("--list shows all deployments, with no other option. Remove the others, or --list.")
    say("listing" if shown else "deploying")
    if shown:
        list_deployments()
        return
    if slots_alone:
        share_gpus(request, sure=sure)
        return
    usual = os.environ.get("FLOWMILL_ROOT")
    defaults = {"root": usual} if usual else {}
    deploy(request.model_copy(update={"parameters": parameters, "defaults": defaults}), sure=sure)


def deploy(request: DeployRequest, *, sure: bool) -> None:
    """Create or change deployments, after confirmation if a user's setting would be replaced; print their workers.

    Args:
        request: the request.
        sure: skip the confirmation.
    """
    from flowmill.flows.deployments import plan, workers

    planned = plan(request)
    for name in planned.left_out:
        console.print(f"{name} is left out: it trains from a config. Name one with --config.")
    rows = _confirmed(planned, sure=sure)
    _print(rows)
    for line in workers(rows):
        console.print(f"run the worker: {line}")


def share_gpus(request: DeployRequest, *, sure: bool) -> None:
    """Set the number of GPUs that all flow runs share, after confirmation if that replaces another number."""
    from flowmill.flows.deployments import plan_slots

    _confirmed(plan_slots(request), sure=sure)
    console.print(f"All flow runs share {request.gpu_slots} GPUs.")


def _confirmed(planned: DeploymentPlan, *, sure: bool) -> Sequence[Listed]:
    """Print the changes, make them after confirmation, and return the resulting deployments."""
    from flowmill.flows.deployments import apply_plan

    for each in planned.changes:
        console.print(str(each))
    if not sure:
        separate = " --name NAME creates a separate deployment." if planned.edits else ""
        _confirm([each for each in planned.changes if each.asks], separate)
    return apply_plan(planned)


def list_deployments() -> None:
    """Print all deployments of flowmill's flows on the server."""
    from flowmill.flows.deployment_list import redeploy_notes
    from flowmill.flows.deployments import every_deployment

    rows = every_deployment()
    if rows:
        _print(rows)
        for line in redeploy_notes(rows):
            console.print(line)
    else:
        console.print("There are no deployments. Create some with: flowmill deploy --all --config CONFIG")


def _confirm(lost: Sequence[Change], separate: str) -> None:
    """Ask whether to replace a user's settings; raise if the user declines or standard input is no terminal."""
    if not lost:
        return
    listed = "; ".join(map(str, lost))
    confirm(
        "Replace these settings?",
        unasked=f"This would replace settings on the server, and nothing is changed yet: {listed}. Give --yes to "
        f"replace them.{separate}",
        declined=f"Nothing was changed.{separate}",
    )


def _print(rows: Sequence[Listed]) -> None:
    table = Table(box=None, pad_edge=False)
    for title in ("deployment", "run", "config", "schedule", "next start"):
        table.add_column(title)
    for row in rows:
        table.add_row(row.name, row.run, row.config, row.schedule, row.next_start)
    print_table(table, cut=("config", "schedule"))


def confirm(question: str, *, unasked: str, declined: str) -> None:
    """Ask for confirmation on the terminal."""
    if not sys.stdin.isatty():
        raise ConfigError(unasked)
    if not typer.confirm(question):
        raise CancelledError(declined)
