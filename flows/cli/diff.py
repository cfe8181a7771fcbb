"""``flowmill diff``: a comparison of two runs."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from flowmill.configs.gc_tuning import without_collecting
from flowmill.flows.cli.error_reporting import say
from flowmill.flows.cli.options import AsJson, Root, TrustStore
from flowmill.flows.cli.report import write_report
from flowmill.flows.console import console, print_json, print_table
from flowmill.flows.environment import existing_root

if TYPE_CHECKING:
    from flowmill.tasks.reports.comparison import RunDifference


def diff_command(
    first: Annotated[str, typer.Argument(help="Run.", metavar="RUN")],
    second: Annotated[str, typer.Argument(help="Another.", metavar="RUN")],
    *,
    images: Annotated[
        Path | None, typer.Option("--images", help="HTML file to write with their images side by side.", metavar="FILE")
    ] = None,
    root: Root = None,
    trust_store: TrustStore = False,
    as_json: AsJson = False,
) -> None:
    """Print the settings in which two runs differ, the artifacts they share, and their evaluations."""
    uri = existing_root(root)
    say(f"reading {uri}", quiet=as_json)
    with without_collecting():
        _diff(first, second, root=uri, trusted=trust_store, as_json=as_json)
    if images is not None:
        # Standard output is the JSON alone.
        with redirect_stdout(sys.stderr if as_json else sys.stdout):
            write_report([first, second], root=uri, out=images, trusted=trust_store)


def _diff(first: str, second: str, *, root: str, trusted: bool, as_json: bool) -> None:
    from flowmill.tasks.reports.comparison import compare
    from flowmill.tasks.runs.opening import open_run

    contexts = [open_run(root, name, reads=True, trusted=trusted) for name in (first, second)]
    difference = compare(*contexts)
    if as_json:
        print_json(
            {
                "runs": [first, second],
                "settings": difference.settings,
                "contents": difference.contents,
                "shared": difference.shared,
                "own": difference.own,
                "parts_at": None if difference.parts_at is None else str(difference.parts_at),
                "figures": {str(epoch): list(both) for epoch, both in difference.figures.items()},
            }
        )
    else:
        _print(first, second, difference)


def _print(first: str, second: str, difference: RunDifference) -> None:
    from flowmill.tasks.metrics.evaluations import flat

    settings = Table("setting", first, second, title="Settings")
    for key, (one, other) in difference.settings.items():
        settings.add_row(key, str(one), str(other))
    if difference.settings:
        print_table(settings, cut=(first, second))
    else:
        console.print("Their settings are the same.")
    for sentence in difference.contents:
        console.print(f"{sentence[0].upper()}{sentence[1:]}")
    artifacts = Table("stage", "shared", f"only {first}", f"only {second}", title="Artifacts")
    for stage, shared in difference.shared.items():
        artifacts.add_row(stage, str(shared), *(str(count) for count in difference.own[stage]))
    print_table(artifacts)
    if difference.parts_at is not None:
        console.print(f"They part at {difference.parts_at}.")
    figures = Table("epoch", "prompts", "reward", "figure", first, second, title="Evaluations")
    for epoch, both in difference.figures.items():
        one, other = map(flat, both)
        for name in {**one, **other}:
            values = ("" if name not in each else f"{each[name]:.4g}" for each in (one, other))
            figures.add_row(str(epoch), *name, *values)
    print_table(figures, cut=(first, second))
