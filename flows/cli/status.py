"""``flowmill status``."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from flows.cli.console import console, default_root, print_json
from storage.commit import ArtifactStore
from storage.lineage import RunFolder, list_runs


def status_command(name: str | None, *, root: str | None, as_json: bool) -> None:
    """Print all runs, or one."""
    from tasks.runs import describe_run, require_run

    store = ArtifactStore(default_root(root))
    if name is not None:
        described = describe_run(require_run(store, name))
        print_json(described) if as_json else _print_run(described)
        return
    runs = [describe_run(RunFolder(store, each)) for each in list_runs(store)]
    if as_json:
        keys = ("run", "epochs", "finished_epochs")
        print_json([{key: run[key] for key in keys} for run in runs])
        return
    if not runs:
        console.print(f"No runs in '{store.root.uri}'. Start one with 'flowmill run CONFIG'.")
        return
    table = Table("run", "epochs", "last evaluation")
    for run in runs:
        table.add_row(run["run"], f"{run['finished_epochs']} of {run['epochs']}", _last_figures(run))
    console.print(table)


def _last_figures(run: dict[str, Any]) -> str:
    evaluations = run["evaluations"]
    if not evaluations:
        return ""
    last = max(evaluations, key=int)
    figures = [
        f"{split} {slot} {values['mean']:.3f}"
        for split, rewards in evaluations[last].items()
        for slot, values in rewards.items()
    ]
    return f"epoch {last}: " + ", ".join(figures)


def _print_run(run: dict[str, Any]) -> None:
    console.print(f"run [bold]{run['run']}[/bold] in {run['root']}: {run['finished_epochs']} of {run['epochs']} epochs")
    table = Table("epoch", "split", "reward", "mean", "exact", title="Evaluations", title_justify="left")
    for epoch, splits in sorted(run["evaluations"].items(), key=lambda item: int(item[0])):
        for split, rewards in splits.items():
            for slot, values in rewards.items():
                table.add_row(epoch, split, slot, f"{values['mean']:.3f}", f"{values['exact']:.3f}")
    console.print(table)
    artifacts = Table("epoch", "stage", "slot", "artifact", title="Artifacts", title_justify="left")
    for made in run["artifacts"]:
        artifacts.add_row(str(made["epoch"]), made["stage"], made["slot"], made["artifact"])
    console.print(artifacts)
