"""Commands that inspect, compare, measure and export configs and runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from flows.cli.app import app
from flows.cli.error_reporting import brief, say
from flows.cli.options import AsJson, Config, Epochs, Long, Overrides, Quiet, Root, Stages, TrustStore
from flows.environment import existing_root


@app.command()
def check(
    config: Config,
    overrides: Overrides = None,
    gpu_memory: Annotated[
        float | None, typer.Option("--gpu-memory", help="List changes to fit a GPU with this memory.", metavar="GB")
    ] = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read every byte of a local model again instead of trusting its file times.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check a config: print it with all defaults filled in, the cost of the run, and the memory it needs."""
    say(f"reading {config}", quiet=as_json)
    from flows.cli.check import check_command

    check_command(config, overrides or [], as_json=as_json, gpu_memory=gpu_memory, deep=deep)


@app.command()
def status(
    run: Annotated[str | None, typer.Argument(help="Run; all runs when absent.", metavar="[RUN]")] = None,
    why: Annotated[
        str | None, typer.Option("--why", help="Say why a stage is fresh, stale or missing.", metavar="STAGE@EPOCH")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 if any artifact is stale.")] = False,
    stage: Stages = None,
    epoch: Epochs = None,
    long: Long = False,
    root: Root = None,
    as_json: AsJson = False,
) -> None:
    """Show the runs of a store, or the fresh, stale and missing stages of one run, and its evaluations."""
    uri = existing_root(root)
    say(f"reading {uri}", quiet=as_json)
    with brief():
        from flows.cli.filters import EntryFilter
        from flows.cli.status import StatusRequest, status_command

        listed = EntryFilter(stages=stage or (), epochs=epoch or (), long=long)
        status_command(StatusRequest(run=run, root=uri, why=why, check=check, listed=listed, as_json=as_json))


@app.command()
def diff(
    first: Annotated[str, typer.Argument(help="Run.", metavar="RUN")],
    second: Annotated[str, typer.Argument(help="Another.", metavar="RUN")],
    images: Annotated[
        Path | None, typer.Option("--images", help="HTML file to write with their images side by side.", metavar="FILE")
    ] = None,
    root: Root = None,
    as_json: AsJson = False,
) -> None:
    """Compare two runs: differing settings, shared artifacts, and evaluations."""
    uri = existing_root(root)
    say(f"reading {uri}", quiet=as_json)
    with brief():
        from flows.cli.diff import diff_command

        diff_command(first, second, root=uri, as_json=as_json)
    if images is not None:
        from flows.cli.report import report_command

        report_command([first, second], root=uri, out=images)


@app.command()
def report(
    runs: Annotated[list[str], typer.Argument(help="One run, or several to compare.", metavar="RUN...")],
    out: Annotated[Path | None, typer.Option("--out", help="File to write.", metavar="FILE")] = None,
    price: Annotated[
        float | None, typer.Option("--price", help="Price per hour of work, to report the run's cost.", min=0)
    ] = None,
    track: Annotated[bool, typer.Option("--track", help="Also log the file to the MLflow run of each.")] = False,
    root: Root = None,
) -> None:
    """Write the results of a run, or a comparison of several, as one self-contained HTML file."""
    uri = existing_root(root)
    say(f"reading {uri}")
    from flows.cli.report import report_command

    report_command(runs, root=uri, out=out, price=price, track=track)


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
        str | None, typer.Option("--prompts", help="Prompts, if the benchmark ships none.", metavar="FILE")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="For a folder: a config with its family.", metavar="CONFIG")
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder for result files.", metavar="FOLDER")] = Path("benchmarks"),
    processes: Annotated[
        int, typer.Option("--processes", min=1, help="Processes that share the work, a GPU each.", metavar="N")
    ] = 1,
    root: Root = None,
    trust_store: TrustStore = False,
    quiet: Quiet = False,
) -> None:
    """Measure models on pinned prompts, seeds and settings, and compare them prompt by prompt."""
    say(f"benchmark {name}", quiet=quiet)
    from flows.cli.benchmark import BenchmarkRequest, benchmark_command

    request = BenchmarkRequest(
        name=name,
        models=models or (),
        against=against or (),
        prompts=prompts,
        config=config,
        out=out,
        processes=processes,
        trust_store=trust_store,
    )
    benchmark_command(request, root=root, quiet=quiet)


@app.command()
def view(
    run: Annotated[str | None, typer.Argument(help="Run to begin with.", metavar="[RUN]")] = None,
    root: Root = None,
    port: Annotated[int, typer.Option("--port", help="Port on the loopback interface.")] = 8501,
    trust_store: TrustStore = False,
) -> None:
    """Browse trajectories by prompt, reward and advantage, by group, and a sample's denoising chain by step."""
    uri = existing_root(root)
    from flows.cli.view import view_command

    view_command(uri, run, port=port, trust_store=trust_store)


@app.command()
def track(
    run: Annotated[str, typer.Argument(help="Run.", metavar="RUN")],
    uri: Annotated[
        str | None, typer.Option("--uri", help="Another MLflow tracker than the run's own.", metavar="URI")
    ] = None,
    root: Root = None,
    trust_store: TrustStore = False,
) -> None:
    """Log a run to MLflow from its committed artifacts: all of it, or the records lost in an outage."""
    from flows.cli.track import track_command

    track_command(run, uri=uri, root=root, trust_store=trust_store)


@app.command()
def publish(
    model: Annotated[str, typer.Argument(help="Run, or RUN@EPOCH.", metavar="RUN[@EPOCH]")],
    repo: Annotated[str, typer.Argument(help="Repository on the Hugging Face Hub.", metavar="OWNER/NAME")],
    epoch: Annotated[int | None, typer.Option("--epoch", help="Epoch of the export; the last when absent.")] = None,
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    token_env: Annotated[
        str | None, typer.Option("--token-env", help="Environment variable that holds the token.", metavar="NAME")
    ] = None,
    root: Root = None,
) -> None:
    """Upload the exported model and its card to the Hugging Face Hub. No other command uploads anything."""
    from flows.cli.publish import publish_command

    publish_command(model, repo, epoch=epoch, private=private, token_env=token_env, root=root)


@app.command()
def export(
    model: Annotated[str, typer.Argument(help="Run, or RUN@EPOCH.", metavar="RUN[@EPOCH]")],
    to: Annotated[Path, typer.Option("--to", help="Folder to make.", metavar="DIR")],
    form: Annotated[
        Literal["model", "dcp"],
        typer.Option("--format", help="model, for diffusers; dcp: weights and optimizer, for torch."),
    ] = "model",
    root: Root = None,
) -> None:
    """Copy the exported model of a run into a folder, or write its policy as a torch checkpoint."""
    uri = existing_root(root)
    from flows.cli.export import export_command

    export_command(model, to, form=form, root=uri)


@app.command()
def presets(
    kind: Annotated[
        str | None,
        typer.Option("--kind", help="Only presets of this kind of policy, as in --long.", metavar="KIND"),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Only presets whose model or family contains TEXT.", metavar="TEXT")
    ] = None,
    memory: Annotated[
        float | None,
        typer.Option("--memory", help="Only presets that fit a GPU with this memory; 0: a CPU.", metavar="GB", min=0),
    ] = None,
    long: Long = False,
    as_json: AsJson = False,
) -> None:
    """List the configs that come with flowmill: name, model, algorithm and memory."""
    from flows.cli.presets import PresetFilter, presets_command

    presets_command(PresetFilter(kind=kind, model=model, memory=memory), long=long, as_json=as_json)


@app.command()
def ui(
    root: Root = None,
    mlflow_port: Annotated[int, typer.Option(help="Port of the MLflow UI.")] = 5000,
    prefect_port: Annotated[int, typer.Option(help="Port of the Prefect UI.")] = 4200,
) -> None:
    """Serve the MLflow and Prefect UIs on the loopback interface until Ctrl-C."""
    uri = existing_root(root)
    say(f"starting MLflow and Prefect for {uri}")
    from flows.cli.ui import ui_command

    ui_command(uri, mlflow_port=mlflow_port, prefect_port=prefect_port)
