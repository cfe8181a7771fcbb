"""Commands that start work: deployments, workers and reward servers."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from configs.errors import ConfigError
from flows.cli.app import app
from flows.cli.error_reporting import say
from flows.cli.options import Kind, Kinds, Pool, Quiet, Root


@app.command("serve-reward")
def serve_reward(
    name: Annotated[str, typer.Argument(help="Reward: a name, or your own package.module:name.", metavar="NAME")],
    options: Annotated[
        list[str] | None, typer.Option("--set", help="Option of the reward: key=value.", metavar="KEY=VALUE")
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port; 0 takes a free one.", min=0, max=65535)] = 8600,
    device: Annotated[str | None, typer.Option("--device", help="Torch device of the reward.")] = None,
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", help="Samples per call of the reward.", min=1, metavar="N")
    ] = None,
    waiting: Annotated[
        int, typer.Option("--waiting", help="Samples that may wait; further requests are asked to retry later.", min=1)
    ] = 4096,
    max_mb: Annotated[int, typer.Option("--max-mb", help="Largest request, in MB.", min=1)] = 256,
    quiet: Quiet = False,
) -> None:
    """Serve one reward over HTTP until stopped, for runs in other processes."""
    from flows.cli.serve import serve_command
    from tasks.execution.serve_reward import ServeRequest

    request = ServeRequest(
        name=name,
        options=options or (),
        host=host,
        port=port,
        device=device,
        batch_size=batch_size,
        waiting=waiting,
        max_mb=max_mb,
    )
    serve_command(request, quiet=quiet)


@app.command()
def deploy(
    everything: Annotated[bool, typer.Option("--all", help="All deployments.")] = False,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="This flow: pipeline, continue or a stage.", metavar="FLOW")
    ] = None,
    shown: Annotated[bool, typer.Option("--list", help="List the deployments, and change nothing.")] = False,
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the deployment; others stay unchanged.", metavar="NAME")
    ] = None,
    config: Annotated[str | None, typer.Option("--config", help="Config or preset, for pipeline.")] = None,
    run: Annotated[str | None, typer.Option("--run", help="Run, for all other flows.", metavar="RUN")] = None,
    root: Root = None,
    advance: Annotated[
        int | None, typer.Option("--advance", help="Epochs to train each time, for pipeline and continue.", min=1)
    ] = None,
    schedule: Annotated[
        str | None, typer.Option("--schedule", help="'0 2 * * *', 'every 30 s' (s, min, h, d), or an RRULE.")
    ] = None,
    timezone: Annotated[str, typer.Option("--timezone", help="Time zone of the schedule.")] = "UTC",
    pool: Annotated[
        str | None, typer.Option("--pool", help="Work pool; 'flowmill' for new deployments.", metavar="NAME")
    ] = None,
    kind: Annotated[Kinds | None, typer.Option("--type", help="Type of the pool, if it is created.")] = None,
    image: Annotated[str | None, typer.Option("--image", help="Container image.")] = None,
    gpu_slots: Annotated[
        int | None, typer.Option("--gpu-slots", help="GPUs that all flow runs share.", min=1, metavar="N")
    ] = None,
    sure: Annotated[bool, typer.Option("--yes", help="Replace settings on the server without asking.")] = False,
) -> None:
    """Create Prefect deployments of the pipeline and the stages; settings not given stay unchanged on the server."""
    if everything + bool(only) + shown != 1:
        raise ConfigError(
            "Say which deployments: --all, or --only FLOW, which may be given again; --list shows those that exist."
        )
    say("listing" if shown else "deploying")
    from flows.cli.deploy import deploy_command, list_command
    from flows.deployments import DeployRequest

    if shown:
        list_command()
        return
    given = {"config": config, "run": run, "root": root, "advance": advance}
    usual = os.environ.get("FLOWMILL_ROOT")
    request = DeployRequest(
        only=only or (),
        name=name,
        parameters={field: value for field, value in given.items() if value is not None},
        defaults={"root": usual} if usual else {},
        schedule=schedule,
        timezone=timezone,
        pool=pool,
        kind=kind,
        image=image,
        gpu_slots=gpu_slots,
    )
    deploy_command(request, sure=sure)


@app.command()
def worker(
    pool: Pool = "flowmill",
    kind: Kind = "process",
    limit: Annotated[int | None, typer.Option("--limit", help="Flow runs at a time.", min=1, metavar="N")] = None,
) -> None:
    """Run a Prefect worker that executes deployments until stopped."""
    from flows.cli.deploy import worker_command

    worker_command(pool, kind=kind, limit=limit)
