"""``flowmill run --dry``: what would be computed, why, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from configs.amounts import duration
from configs.load import load_config
from flows.console import console
from flows.environment import as_overrides


def dry_command(config: Path, *, root: str | None, name: str | None, overrides: Sequence[str]) -> None:
    """Print the forecast of a run; nothing is made, no model is loaded."""
    checked = load_config(config, [*overrides, *as_overrides(root, name)])
    from tasks.preflight.names import check_names

    check_names(checked, source=config, overrides=overrides)
    from tasks.preflight.forecast import forecast

    made = forecast(checked)
    title = f"{checked.run.name}: {made.due} artifacts to compute"
    table = Table("stage", "fresh", "reused", "to compute", "denoiser rows", "time", "first reason", title=title)
    table.title_justify = "left"
    for stage in made.stages:
        rows = "" if stage.rows is None else f"{stage.rows:,}"
        time = "" if stage.seconds is None else f"about {duration(stage.seconds)}"
        counts = (stage.fresh, stage.reused, stage.due)
        table.add_row(stage.stage, *(str(count or "") for count in counts), rows, time, escape(stage.reason))
    console.print(table)
    if made.conflicts:
        console.print(
            f"Run '{checked.run.name}' exists with other settings, so this would be refused; with --name NAME it is "
            "another run, which computes the above:",
            markup=False,
        )
        for line in made.conflicts:
            console.print(f"  {line}", markup=False)
    elif not made.due:
        console.print("Nothing to do: everything this config asks for is committed.")
