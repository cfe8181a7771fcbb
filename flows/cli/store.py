"""``flowmill store``: what is in a store, and whether it is intact."""

from __future__ import annotations

from typing import Annotated, Any

import typer

store_app = typer.Typer(help="Look into an artifact store.", no_args_is_help=True)

Root = Annotated[str | None, typer.Option("--root", help="Folder of the artifact store.", metavar="URI")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]


@store_app.command()
def ls(root: Root = None, as_json: AsJson = False) -> None:
    """List artifacts: kind, id, stage, shards, rows, size, and which runs use them."""
    from rich.table import Table

    from flows.cli.console import console, print_json, size
    from storage.verify import list_artifacts

    found = list_artifacts(_open(root))
    if as_json:
        print_json(found)
        return
    table = Table("artifact", "stage", "shards", "rows", "size", "state", "runs")
    for item in found:
        state = "grows" if item["artifact"].startswith("embeddings/") else ("incomplete", "complete")[item["complete"]]
        row = (item["artifact"], item["stage"], item["shards"], item["rows"], size(item["size"]), state)
        table.add_row(*(str(value) for value in row), ", ".join(item["runs"]))
    console.print(table)


@store_app.command()
def show(
    artifact: Annotated[str, typer.Argument(help="Artifact, kind/id; the id may be shortened.", metavar="ARTIFACT")],
    root: Root = None,
    as_json: AsJson = False,
) -> None:
    """Show one artifact: options, inputs, shards, figures, and the schema of its tables."""
    from flows.cli.console import console, print_json
    from storage.verify import describe_artifact

    described = describe_artifact(_open(root), artifact)
    if as_json:
        print_json(described)
        return
    for key, value in described.items():
        console.print(f"[bold]{key}[/bold]")
        for line in _lines(value):
            console.print(f"  {line}", markup=False)


@store_app.command()
def verify(
    root: Root = None,
    deep: Annotated[bool, typer.Option("--deep", help="Also compare checksums of every byte.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check every committed artifact: files present, sizes right, with --deep also content. Exit code 1 if not."""
    from flows.cli.console import console, print_json
    from storage.verify import verify_store

    report = verify_store(_open(root), deep=deep)
    if as_json:
        print_json(report)
    else:
        for problem in report["problems"]:
            console.print(problem, markup=False)
        console.print(f"{report['artifacts']} artifacts, {report['files']} files: {len(report['problems'])} problems")
    if report["problems"]:
        raise typer.Exit(1)


@store_app.command()
def digest(
    run: Annotated[str, typer.Argument(help="Run.", metavar="RUN")], root: Root = None, as_json: AsJson = False
) -> None:
    """Print one hash over the content of all artifacts of a run, without times or hosts."""
    from flows.cli.console import console, print_json
    from tasks.runs import require_run

    value = require_run(_open(root), run).digest()
    print_json({"run": run, "digest": value}) if as_json else console.print(value)


def _open(root: str | None) -> Any:
    from flows.cli.console import default_root
    from storage.commit import ArtifactStore

    return ArtifactStore(default_root(root))


def _lines(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [f"{key}: {item}" for key, item in value.items()]
    if isinstance(value, list):
        return [str(item) for item in value]
    return [str(value)]
