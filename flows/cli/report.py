"""``flowmill report``: the results of runs as one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowmill.configs.escaping import quoted
from flowmill.flows.cli.error_reporting import say
from flowmill.flows.cli.options import Root, TrustStore
from flowmill.flows.console import console
from flowmill.flows.environment import existing_root

if TYPE_CHECKING:
    from flowmill.tasks.runs.context import RunContext


def report_command(
    names: Annotated[list[str], typer.Argument(help="One run, or several to compare.", metavar="RUN...")],
    *,
    out: Annotated[Path | None, typer.Option("--out", help="File to write.", metavar="FILE")] = None,
    price: Annotated[
        float | None, typer.Option("--price", help="Price per hour of work, to report the run's cost.", min=0)
    ] = None,
    track: Annotated[bool, typer.Option("--track", help="Also log the file to the MLflow run of each.")] = False,
    root: Root = None,
    trust_store: TrustStore = False,
) -> None:
    """Write the report of one run, or a comparison of several, and print its location."""
    uri = existing_root(root)
    say(f"reading {uri}")
    contexts, html = write_report(names, root=uri, out=out, price=price, trusted=trust_store)
    if track:
        from flowmill.tasks.tracking.reports import log_report

        for context in contexts:
            console.print(f"logged to {log_report(context, html)}")


def write_report(
    names: Sequence[str], *, root: str, out: Path | None, price: float | None = None, trusted: bool = False
) -> tuple[list[RunContext], str]:
    """Write the report of one run, or a comparison of several, print its location, and return the runs and the text."""
    from flowmill.tasks.reports.report import run_report, save_report
    from flowmill.tasks.runs.opening import open_run

    contexts = [open_run(root, name, reads=True, trusted=trusted) for name in names]
    html = run_report(*contexts, price=price)
    say_report(save_report(html, out or Path(f"{'-'.join(names)}-report.html")))
    return contexts, html


def say_report(file: Path) -> None:
    """Print the location of a report."""
    console.print(f"report: {quoted(file)}")
