"""The summary that ``flowmill run`` prints at the end: rewards before and after, times, and locations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from flowmill.configs.errors import NotCommittedError
from flowmill.configs.escaping import command, quoted
from flowmill.configs.human_units import duration
from flowmill.configs.roots import root_option, short_place
from flowmill.flows.cli.status_tables import change
from flowmill.flows.console import console, print_table
from flowmill.tasks.metrics.best import best_of
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runs.progress import Ledger


def print_summary(context: RunContext, result: Mapping[str, Any], *, quiet: bool) -> None:
    """Print the result of a finished run, as ``flowmill.tasks.metrics.describe.describe_result`` gives it."""
    _print_rewards(result)
    if quiet:
        return
    judges = ", ".join(section.slot for section in context.config.evaluate.judges)
    if judges:
        console.print(f"{judges}: only scored, never optimized")
    _print_best(context, result)
    _print_time(context.ledger)
    _print_places(context, result)


def _print_rewards(result: Mapping[str, Any]) -> None:
    epochs = sorted(result["evaluations"], key=int)
    if not epochs:
        raise NotCommittedError(f"Run '{result['run']}' has no evaluation.")
    first, last = result["evaluations"][epochs[0]], result["evaluations"][epochs[-1]]
    exact = any("exact" in values for rewards in last.values() for values in rewards.values())
    columns = ["reward", "prompts", "mean", *(["exact match"] if exact else [])]
    table = Table(*columns, title=f"{result['run']}, epoch 0 -> {epochs[-1]}")
    for split in ("train", "heldout"):
        for slot, after in last.get(split, {}).items():
            course = [first.get(split, {}).get(slot, {}), after]
            table.add_row(slot, split, *(change(course, figure) for figure in ("mean", "exact")[: len(columns) - 2]))
    print_table(table)
    # Results of runs from versions without monitors lack the key.
    for warning in result.get("warnings", ()):
        console.print(f"warning: {warning}", style="yellow")


def _print_best(context: RunContext, result: Mapping[str, Any]) -> None:
    best = best_of(context.config, {int(epoch): figures for epoch, figures in result["evaluations"].items()})
    last = max(map(int, result["evaluations"]))
    if best is None or best.count < 3:
        return
    if best.epoch in (0, last):
        console.print(f"best epoch: {best.epoch}, {'before training' if best.epoch == 0 else 'the last'} ({best})")
    else:
        root = root_option(context.store.root.uri)
        export = command("flowmill", "export", f"{result['run']}@best", "--to", "DIR", *root)
        console.print(f"best epoch: {best.epoch} ({best}); the last is {last}. To copy its model: {export}")


def _print_time(ledger: Ledger) -> None:
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


def _print_places(context: RunContext, result: Mapping[str, Any]) -> None:
    from flowmill.tasks.tracking.locations import tracking_uri

    root = context.store.root.uri
    for label in ("images", "texts"):
        # Results of runs from versions without texts lack the key.
        for split, path in result.get(label, {}).items():
            place = f"{root}/{path}"
            console.print(f"{label} ({split}): {quoted(short_place(place))}")
    if result["export"] is not None:
        place = f"{root}/{result['export']}"
        console.print(f"exported model: {quoted(short_place(place))}")
    note = context.run.newest("tracking")
    if note is not None:
        uri = tracking_uri(root, context.config.tracking.uri)
        console.print(f"MLflow run: {note['mlflow_run_id']} in {uri}")
        # It serves the store's own database alone.
        if uri == tracking_uri(root, None):
            console.print(f"see it: {command('flowmill', 'ui', *root_option(root))}")
