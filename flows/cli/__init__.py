"""The ``flowmill`` command. Heavy imports happen inside commands, so that ``--help`` is instant."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from configs.packages import user_folder_last
from flows.cli.opening import CommandGroup, last_words, say
from flows.cli.store import store_app
from flows.environment import existing_root, prepare_environment

app = typer.Typer(
    cls=CommandGroup,
    help="Post-train diffusion and flow-matching models with reinforcement learning, as a durable data pipeline.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(store_app, name="store")

Config = Annotated[Path, typer.Argument(help="Config file; presets are in configs/.", metavar="CONFIG")]
Root = Annotated[str | None, typer.Option("--root", help="Folder of the artifact store.", metavar="URI")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="Override a setting: section.key=value.", metavar="KEY=VALUE")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print the result only.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            say(f"flowmill {version('flowmill')}")
        except PackageNotFoundError:
            say("flowmill, run from a folder where it is not installed")
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Take the options every command shares."""


@app.command()
def run(
    config: Config,
    root: Root = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the run.", metavar="RUN")] = None,
    overrides: Overrides = None,
    dry: Annotated[bool, typer.Option("--dry", help="List what would be computed, why, and what it costs.")] = False,
    quiet: Quiet = False,
) -> None:
    """Run a training run, or continue it where it stopped: what is committed is never computed again."""
    say(f"reading {config}", quiet=quiet)
    if dry:
        from flows.cli.dry import dry_command

        dry_command(config, root=root, name=name, overrides=overrides or [])
        return
    from flows.cli.run import run_command

    run_command(config, root=root, name=name, overrides=overrides or [], quiet=quiet)


@app.command()
def check(
    config: Config,
    overrides: Overrides = None,
    gpu_memory: Annotated[
        float | None, typer.Option("--gpu-memory", help="Say what to change to fit a GPU of so many GB.", metavar="GB")
    ] = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read every byte of a local model again instead of trusting its file times.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check a config: print it with every default filled in, what the run will cost, and the memory it needs."""
    say(f"reading {config}", quiet=as_json)
    from flows.cli.check import check_command

    check_command(config, overrides or [], as_json=as_json, gpu_memory=gpu_memory, deep=deep)


@app.command()
def stage(
    name: Annotated[str, typer.Argument(help="Stage: base, encode, preprocess, rollout, score, ...", metavar="NAME")],
    run: Annotated[str, typer.Option("--run", help="Run the stage belongs to.", metavar="RUN")],
    epoch: Annotated[int, typer.Option("--epoch", help="Epoch; 0 is before training.", min=0, metavar="N")] = 0,
    evaluation: Annotated[
        str, typer.Option("--name", help="Of evaluate and judge: a name beside the run's own.", metavar="NAME")
    ] = "",
    force: Annotated[bool, typer.Option("--force", help="Do the work again as a new attempt.")] = False,
    downstream: Annotated[
        bool, typer.Option("--downstream", help="Afterwards do what became due because of it.")
    ] = False,
    root: Root = None,
    overrides: Overrides = None,
    quiet: Quiet = False,
) -> None:
    """Run one stage of one epoch alone, with other settings if you like; nothing else is computed."""
    uri = existing_root(root)
    say(f"{name} of run '{run}': loading what it needs", quiet=quiet)
    from tasks.names import check_stage

    check_stage(name)
    from flows.cli.stage import StageRequest, stage_command

    request = StageRequest(
        name=name,
        run=run,
        epoch=epoch,
        evaluation=evaluation,
        force=force,
        downstream=downstream,
        overrides=overrides or (),
    )
    stage_command(request, root=uri, quiet=quiet)


@app.command()
def benchmark(
    name: Annotated[str, typer.Argument(help="Benchmark: digits, words, ocr, ..., or a YAML file.", metavar="NAME")],
    models: Annotated[
        list[str] | None, typer.Option("--model", help="RUN@EPOCH or a pipeline's folder.", metavar="MODEL")
    ] = None,
    against: Annotated[
        list[Path] | None, typer.Option("--against", help="Result file to compare with.", metavar="FILE")
    ] = None,
    prompts: Annotated[
        str | None, typer.Option("--prompts", help="Prompts, where the benchmark ships none.", metavar="FILE")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="Of a folder: a config with its family.", metavar="CONFIG")
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder for result files.", metavar="FOLDER")] = Path("benchmarks"),
    root: Root = None,
    quiet: Quiet = False,
) -> None:
    """Measure models on pinned prompts, seeds and settings, and compare them prompt by prompt."""
    say(f"benchmark {name}", quiet=quiet)
    from flows.cli.benchmark import BenchmarkRequest, benchmark_command

    request = BenchmarkRequest(
        name=name, models=models or (), against=against or (), prompts=prompts, config=config, out=out
    )
    benchmark_command(request, root=root, quiet=quiet)


@app.command("serve-reward")
def serve_reward(
    name: Annotated[str, typer.Argument(help="Reward: a name, or package.module:name of your own.", metavar="NAME")],
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
        int, typer.Option("--waiting", help="Samples that may wait; what comes then is asked to come later.", min=1)
    ] = 4096,
    max_mb: Annotated[int, typer.Option("--max-mb", help="Largest request, in MB.", min=1)] = 256,
    quiet: Quiet = False,
) -> None:
    """Score for runs elsewhere: serve one reward over HTTP until stopped."""
    from flows.cli.serve import serve_command
    from tasks.serve_reward import ServeRequest

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
def status(
    run: Annotated[str | None, typer.Argument(help="Run; all runs when absent.", metavar="[RUN]")] = None,
    why: Annotated[
        str | None, typer.Option("--why", help="Say why a stage is fresh, stale or missing.", metavar="STAGE@EPOCH")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 if anything is stale.")] = False,
    root: Root = None,
    as_json: AsJson = False,
) -> None:
    """Show the runs of a store, or of one run which stages are fresh, stale or missing, and its evaluations."""
    uri = existing_root(root)
    say(f"reading {uri}", quiet=as_json)
    from flows.cli.status import status_command

    status_command(run, root=uri, why=why, check=check, as_json=as_json)


@app.command()
def publish(
    run: Annotated[str, typer.Argument(help="Run.", metavar="RUN")],
    repo: Annotated[str, typer.Argument(help="Repository on the Hugging Face Hub.", metavar="OWNER/NAME")],
    epoch: Annotated[int | None, typer.Option("--epoch", help="Which export; the last when absent.")] = None,
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    token_env: Annotated[
        str | None, typer.Option("--token-env", help="Environment variable that holds the token.", metavar="NAME")
    ] = None,
    root: Root = None,
) -> None:
    """Upload the exported model and its card to the Hugging Face Hub. Nothing else ever uploads anything."""
    from flows.cli.publish import publish_command

    publish_command(run, repo, epoch=epoch, private=private, token_env=token_env, root=root)


@app.command()
def ui(
    root: Root = None,
    mlflow_port: Annotated[int, typer.Option(help="Port of the MLflow UI.")] = 5000,
    prefect_port: Annotated[int, typer.Option(help="Port of the Prefect UI.")] = 4200,
) -> None:
    """Open the MLflow and Prefect UIs on this machine's loopback interface until Ctrl-C."""
    uri = existing_root(root)
    say(f"starting MLflow and Prefect for {uri}")
    from flows.cli.ui import ui_command

    ui_command(uri, mlflow_port=mlflow_port, prefect_port=prefect_port)


def main() -> None:
    """Run the command line; a mistake is one message on standard error and exit code 1, without a traceback."""
    prepare_environment()
    # Rewards and models of your own are found in the folder you work in, after all else.
    user_folder_last()
    with last_words():
        app(prog_name="flowmill")
