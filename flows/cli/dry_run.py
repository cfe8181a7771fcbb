"""``flowmill run --dry``: the artifacts to compute, the reasons, and the cost."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from rich.table import Table

from flowmill.configs.gc_tuning import without_collecting
from flowmill.configs.human_units import duration
from flowmill.flows.chained import named
from flowmill.flows.cli.command_resolution import ResolvedRequest
from flowmill.flows.console import console, print_table


def dry_command(due: Sequence[ResolvedRequest]) -> None:
    """Print the forecast of a run, without creating anything or loading a model.

    Args:
        due: the run, or before it those that it starts from; the work of a run follows from its start.
    """
    with named(due[0].config, due):
        _forecast(due[0])
    for first, following in pairwise(due):
        name, start = following.config.run.name, first.config.run.name
        console.print(f"{name}: its work is known once '{start}', from which it starts, is done.")


def _forecast(resolved: ResolvedRequest) -> None:
    with without_collecting():
        from flowmill.tasks.checks.stage_forecast import forecast

        stages = forecast(resolved.config, resolved.run)
    name = resolved.config.run.name
    due = sum(stage.due for stage in stages)
    title = f"{name}: {due} artifacts to compute"
    table = Table("stage", "found", "reused", "to compute", "model rows", "time", "first reason", title=title)
    for stage in stages:
        rows = "" if stage.rows is None else f"{stage.rows:,}"
        time = "" if stage.seconds is None else f"about {duration(stage.seconds)}"
        counts = (stage.fresh, stage.reused, stage.due)
        table.add_row(stage.stage, *(str(count or "") for count in counts), rows, time, stage.reason)
    table.columns[:] = [column for column in table.columns if any(column.cells)]
    print_table(table, cut=("first reason",))
    if resolved.conflicts:
        console.print(
            f"Run '{name}' exists with other settings, so this would be refused; with --name NAME it is "
            "another run, which computes the above:",
        )
        for line in resolved.conflicts:
            console.print(f"  {line}")
    elif not due:
        console.print("Nothing to do: everything this config asks for is committed.")
