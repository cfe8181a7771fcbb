"""``flowmill sweep``: variants of one config, compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from flowmill.configs.escaping import visible
from flowmill.flows.cli.error_reporting import say
from flowmill.flows.cli.options import Quiet
from flowmill.flows.cli.report import say_report
from flowmill.flows.cli.run import run_flow
from flowmill.flows.console import console, print_table
from flowmill.flows.environment import as_overrides, place_overrides, prepare_environment
from flowmill.flows.requests import SweepRequest

if TYPE_CHECKING:
    from flowmill.configs.schema import RunConfig
    from flowmill.tasks.metrics.sweep import Outcome, SeedSummary


def sweep_command(
    request: SweepRequest,
    *,
    listed: Annotated[
        Path | None, typer.Option("--list", help="File of variants, one line of KEY=VALUE each.", metavar="FILE")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="HTML file to write the comparison to.")] = None,
    quiet: Quiet = False,
) -> None:
    """Run a sweep, print its table, and write its report."""
    say(f"reading {request.config}", quiet=quiet)
    from flowmill.tasks.metrics.sweep import over_seeds, ranking, read_list, selection_note
    from flowmill.tasks.reports.report import check_report, save_report

    settings = [*request.overrides, *as_overrides(request.root, None)]
    lines = [] if listed is None else read_list(listed)
    request = request.model_copy(update={"listed": lines, "overrides": settings})
    configs = _variant_configs(request)
    config = configs[-1]
    # Before heavy imports.
    ranked = ranking(request.config, request.overrides, configs, final=request.final)
    check_report(file := out or Path(f"{request.name}-report.html"))
    prepare_environment(config.execution.threads)
    from flowmill.flows.progress import display
    from flowmill.flows.server import local_api

    say(f"{len(configs)} variants", quiet=quiet)
    with local_api() as api, display(quiet=quiet, epochs=config.run.epochs) as shown:
        from flowmill.flows import process_state
        from flowmill.flows.sweep import sweep

        process_state.use_reporter(shown)
        outcomes, report = run_flow(sweep, api, request)
    _print(request.name, outcomes, order="best first" if ranked.weights is not None else "by name")
    _print_over_seeds(over_seeds(outcomes))
    note = f"There is no best: {ranked.why_none}." if ranked.why_none else ""
    note = note or selection_note(outcomes, prompts=request.final, root=config.store.root)
    if note:
        console.print(visible(note), markup=False, highlight=False, soft_wrap=True)
    if report is not None:
        say_report(save_report(report, file))


def _variant_configs(request: SweepRequest) -> list[RunConfig]:
    """Return the configs of all variants after checks of their names and runs."""
    from flowmill.configs.load import load_config
    from flowmill.storage.artifacts.commit import ArtifactStore
    from flowmill.tasks.checks.names import check_names
    from flowmill.tasks.metrics.sweep import final_settings, variants
    from flowmill.tasks.runs.locks import refuse_while_executing
    from flowmill.tasks.runs.opening import find_run, with_columns_of_run

    configs = []
    for variant in variants(request.name, request.grid, request.listed):
        overrides = [*request.overrides, *variant.overrides]
        config = load_config(request.config, [*overrides, *place_overrides(None, variant.name)])
        configs.append(config)
        overrides += [] if request.final is None else final_settings(config, request.final)
        check_names(load_config(request.config, overrides), source=Path(request.config), overrides=overrides)
        refuse_while_executing(ArtifactStore(config.store), variant.name)
        find_run(with_columns_of_run(config))
    return configs


def _print(name: str, outcomes: Sequence[Outcome], *, order: str) -> None:
    from flowmill.tasks.metrics.sweep import scored_on

    figures = list(dict.fromkeys(figure for each in outcomes for figure in each.figures))
    scores_on = f", scores on {scored_on(outcomes)}" if figures else ""
    table = Table("run", "epoch", *figures, title=f"{name}, {order}{scores_on}")
    for each in outcomes:
        scores = (f"{each.figures[figure]:.4g}" if figure in each.figures else "" for figure in figures)
        table.add_row(each.variant.name, str(each.epoch), *scores)
    print_table(table, optional=figures[:0:-1])


def _print_over_seeds(summaries: Sequence[SeedSummary]) -> None:
    table = Table("settings", "seeds", "figure", "mean", "95 % interval", title="Over seeds")
    for each in summaries:
        settings = " ".join(f"{key}={value}" for key, value in each.settings.items()) or "all"
        for figure, (mean, low, high) in each.figures.items():
            table.add_row(settings, str(each.count), figure, f"{mean:.4g}", f"{low:.4g} to {high:.4g}")
    if table.row_count:
        print_table(table)
