"""Commands that start work: runs, sweeps, stages, deployments, workers and reward servers."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from configs.errors import ConfigError
from configs.escaping import command, quoted
from flows.cli.app import app
from flows.cli.error_reporting import say
from flows.cli.options import Config, Kind, Kinds, Overrides, Pool, Quiet, Root, TrustStore
from flows.environment import existing_root


def _epoch(text: Any) -> Any:
    if str(text) in ("next", "latest"):
        return text
    if not str(text).isdecimal():
        raise typer.BadParameter(f"'{text}' is no epoch. Give a number from 0 on, or next, or latest.")
    return int(text)


@app.command()
def run(
    config: Config,
    root: Root = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the run.", metavar="RUN")] = None,
    overrides: Overrides = None,
    advance: Annotated[
        int | None, typer.Option("--advance", help="Train N epochs more than the run has.", min=1, metavar="N")
    ] = None,
    rewind: Annotated[
        bool, typer.Option("--rewind", help="Shorten a run that has more epochs than the config.")
    ] = False,
    dry: Annotated[bool, typer.Option("--dry", help="List the work to compute, the reasons, and the cost.")] = False,
    quiet: Quiet = False,
) -> None:
    """Run a training run, or continue it where it stopped: committed work is never computed again."""
    say(f"reading {config}", quiet=quiet)
    from flows.cli.command_resolution import understood
    from flows.requests import PipelineRequest

    if rewind and advance is not None:
        raise ConfigError("--advance trains more epochs and --rewind ends a run earlier. Leave one of them out.")
    request = PipelineRequest(
        config=str(config), root=root, name=name, overrides=overrides or [], advance=advance, rewind=rewind
    )
    with ExitStack() as claim:
        asked = understood(request, claim=None if dry else claim)
        say(asked.note or "", quiet=quiet or asked.note is None)
        if dry:
            from flows.cli.dry_run import dry_command

            dry_command(asked)
        else:
            from flows.cli.run import run_command

            run_command(asked, quiet=quiet)


@app.command()
def init(
    preset: Annotated[str, typer.Argument(help="Preset, such as digits.", metavar="PRESET")],
    to: Annotated[Path, typer.Option("--to", help="Folder; made if needed.", metavar="FOLDER")] = Path(),
) -> None:
    """Copy a preset, with its comments and prompts, into your own folder for editing."""
    from configs.presets import copy_preset

    first, *others = copy_preset(preset, to)
    for file in (first, *others):
        say(quoted(file))
    say(f"run it: {command('flowmill', 'run', first)}")


@app.command()
def sweep(
    config: Config,
    grid: Annotated[
        list[str] | None, typer.Option("--grid", help="Values to combine.", metavar="KEY=VALUE,VALUE")
    ] = None,
    listed: Annotated[
        Path | None, typer.Option("--list", help="File of variants, one line of KEY=VALUE each.", metavar="FILE")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the sweep; the config's when absent.")] = None,
    parallel: Annotated[
        int, typer.Option("--parallel", help="Variants at a time, in separate processes.", min=1, metavar="N")
    ] = 1,
    out: Annotated[Path | None, typer.Option("--out", help="HTML file to write the comparison to.")] = None,
    final: Annotated[
        str | None, typer.Option("--final", help="Prompts for a final evaluation of the best.", metavar="PROMPTS")
    ] = None,
    root: Root = None,
    overrides: Overrides = None,
    quiet: Quiet = False,
) -> None:
    """Run variants of a config, which share artifacts if possible, and compare them; an interrupted sweep resumes."""
    say(f"reading {config}", quiet=quiet)
    from flows.cli.sweep import sweep_command
    from flows.environment import as_overrides
    from flows.requests import SweepRequest
    from tasks.metrics.sweep import read_list

    request = SweepRequest(
        config=str(config),
        name=name or f"{config.stem}-sweep",
        root=root,
        grid=grid or [],
        listed=[] if listed is None else read_list(listed),
        overrides=[*(overrides or []), *as_overrides(root, None)],
        parallel=parallel,
        final=final,
    )
    sweep_command(request, out=out, quiet=quiet)


@app.command()
def stage(
    name: Annotated[str, typer.Argument(help="Stage: base, encode, preprocess, rollout, score, ...", metavar="NAME")],
    run: Annotated[str, typer.Option("--run", help="Run the stage belongs to.", metavar="RUN")],
    epoch: Annotated[
        Any, typer.Option("--epoch", help="Epoch, 0 is before training; or: next, latest.", metavar="N", parser=_epoch)
    ] = 0,
    evaluation: Annotated[
        str, typer.Option("--name", help="For evaluate and judge: name of a separate evaluation.", metavar="NAME")
    ] = "",
    force: Annotated[bool, typer.Option("--force", help="Do the work again as a new attempt.")] = False,
    downstream: Annotated[
        bool, typer.Option("--downstream", help="Afterwards run the stages that became due.")
    ] = False,
    root: Root = None,
    overrides: Overrides = None,
    trust_store: TrustStore = False,
    quiet: Quiet = False,
) -> None:
    """Run one stage of one epoch alone, optionally with other settings; nothing else is computed."""
    uri = existing_root(root)
    say(f"{name} of run '{run}': loading", quiet=quiet)
    from tasks.specs.stages import stage_spec

    stage_spec(name)
    from flows.cli.stage import stage_command
    from flows.requests import StageRequest

    request = StageRequest(
        run=run,
        root=uri,
        epoch=epoch,
        evaluation=evaluation,
        force=force,
        overrides=overrides or [],
        trust_store=trust_store,
    )
    stage_command(name, request, downstream=downstream, quiet=quiet)


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
