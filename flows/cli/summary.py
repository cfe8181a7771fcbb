"""What ``flowmill run`` prints in the end: rewards before and after, where time went, where everything is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from configs.errors import NotCommittedError
from flows.cli.console import console, duration
from tasks.runs import describe_run
from tasks.sources import PIPELINE
from tasks.tracking import grids, tracking_uri
from tasks.workspace import Workspace


def print_summary(workspace: Workspace, *, quiet: bool) -> None:
    """Print the result of a finished run."""
    run = describe_run(workspace.run)
    _print_rewards(run)
    if quiet:
        return
    _print_time(workspace)
    _print_places(workspace, run)


def _print_rewards(run: dict[str, Any]) -> None:
    epochs = sorted(run["evaluations"], key=int)
    if not epochs:
        raise NotCommittedError(f"Run '{run['run']}' has no evaluation.")
    first, last = run["evaluations"][epochs[0]], run["evaluations"][epochs[-1]]
    table = Table(
        "reward", "prompts", "mean", "exact match", title=f"{run['run']}, epoch 0 -> {epochs[-1]}", title_justify="left"
    )
    for split in ("train", "heldout"):
        for slot, after in last.get(split, {}).items():
            before = first.get(split, {}).get(slot)
            table.add_row(slot, split, _change(before, after, "mean"), _change(before, after, "exact"))
    console.print(table)


def _change(before: dict[str, float] | None, after: dict[str, float], key: str) -> str:
    return f"{after[key]:.3f}" if before is None else f"{before[key]:.3f} -> {after[key]:.3f}"


def _print_time(workspace: Workspace) -> None:
    ledger = workspace.ledger
    if not ledger.stages():
        console.print("Nothing to do: everything this config asks for is committed. No model was run.")
        return
    parts = [f"{stage} {duration(ledger.seconds(stage))}" for stage in ledger.stages()]
    startup, overhead, busy = ledger.startup(), ledger.overhead(), ledger.busy()
    console.print(f"time: {', '.join(parts)}")
    console.print(
        f"      start-up {duration(startup)}, work {duration(busy)}, "
        f"orchestration + commits + tracking {duration(overhead)} "
        f"({100 * overhead / (startup + busy + overhead):.0f} % of {duration(startup + busy + overhead)})"
    )


def _print_places(workspace: Workspace, run: dict[str, Any]) -> None:
    made = {(item["stage"], item["epoch"]): item["artifact"] for item in run["artifacts"]}
    last = max(epoch for stage, epoch in made if stage == "evaluate")
    entry = workspace.run.require(last, "evaluate")
    for split, path in grids(workspace, entry.ref).items():
        console.print(f"images ({split}): {_short(path)}", markup=False)
    export = workspace.run.find(workspace.config.run.epochs, "export")
    if export is not None:
        record = workspace.store.shards(export.ref)[0]
        console.print(f"exported model: {_short(workspace.store.folder(export.ref, record) / PIPELINE)}", markup=False)
    note = run["tracking"]
    if note is not None:
        uri = tracking_uri(workspace.store.root.uri, workspace.config.tracking.uri)
        console.print(f"MLflow run: {note['mlflow_run_id']} in {uri}", markup=False)
        root = workspace.store.root.uri
        console.print(f"see it: flowmill ui --root {root if '://' in root else _short(Path(root))}", markup=False)


def _short(path: Path) -> Path:
    """Return the path relative to the working directory where that is shorter."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
