"""``flowmill benchmark``: models on pinned samples, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from configs.benchmark import load_benchmark
from configs.errors import ConfigError
from configs.escaping import quoted
from flows.cli.error_reporting import say
from flows.cli.options import Quiet
from flows.cli.run import run_flow
from flows.console import console, print_table
from flows.environment import default_root
from flows.requests import BenchmarkRequest

if TYPE_CHECKING:
    from tasks.algorithms.resampling import Estimate
    from tasks.reports.benchmark_results import Result


def benchmark_command(
    *,
    request: BenchmarkRequest,
    against: Annotated[
        list[Path] | None, typer.Option("--against", help="Result file to compare with.", metavar="FILE")
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder for result files.", metavar="FOLDER")] = Path("benchmarks"),
    quiet: Quiet = False,
) -> None:
    """Measure models, write a result file each, and print them as a table.

    Raises:
        ConfigError: the benchmark, a model or a result cannot be used.
    """
    say(f"benchmark {request.name}", quiet=quiet)
    load_benchmark(request.name, prompts=request.prompts)
    if not request.models and not against:
        raise ConfigError("Nothing to measure: give --model RUN@EPOCH, or a folder, at least once.")
    from tasks.reports.benchmark_results import read_result

    request = request.model_copy(update={"root": default_root(request.root)})
    results = [read_result(file) for file in against or ()]
    made = _measured(request, quiet=quiet) if request.models else []
    files = [result.write(out) for result in made]
    _print([*results, *made])
    for file in files:
        console.print(quoted(file))


def _measured(request: BenchmarkRequest, *, quiet: bool) -> list[Result]:
    from flows.progress import display
    from flows.server import local_api

    with local_api() as api, display(quiet=quiet, epochs=1) as shown:
        from flows import process_state
        from flows.benchmark import benchmark

        process_state.use_reporter(shown)
        return run_flow(benchmark, api, request)  # type: ignore[no-any-return]


def _print(results: Sequence[Result]) -> None:
    from tasks.algorithms.resampling import FEWEST
    from tasks.reports.benchmark_results import compare

    first, *others = results
    table = Table("model", "reward", "mean", "95 %", "difference", "95 %", "p", title=first.title, title_justify="left")
    for reward in first.scores:
        for number, result in enumerate((first, *others)):
            found = result.estimate(reward)
            cells = [f"{found.mean:.4f}", _interval(found, ".4f"), "", "", ""]
            if number:
                compared = compare(first, result, reward)
                change = compared.difference
                cells[2:] = [f"{change.mean:+.4f}", _interval(change, "+.4f"), f"{compared.p:.2g}"]
            table.add_row(result.model, reward, *cells)
    print_table(table, optional=("95 %",))
    comparisons = len(others) * len(first.scores)
    several = (
        f" Of {comparisons} comparisons of equal models the smallest p is below {0.05 / comparisons:.2g} in 5 %."
        if comparisons > 1
        else ""
    )
    few = f" None are given below {FEWEST} prompts." if len(first.prompts) < FEWEST else ""
    how = "intervals by Student's t and bootstrap, or Wilson's where all is 0 or 1; p by flipping signs; over prompts."
    console.print(f"{len(first.prompts)} prompts; {how}{few}{several}")


def _interval(found: Estimate, form: str) -> str:
    """Return an interval as text, empty where there is none."""
    return "" if found.low is None or found.high is None else f"{found.low:{form}} to {found.high:{form}}"
