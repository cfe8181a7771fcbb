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
from flows.cli.options import Quiet, Root, TrustStore
from flows.console import console, print_table
from flows.environment import default_root

if TYPE_CHECKING:
    from tasks.algorithms.resampling import Estimate


def benchmark_command(
    name: Annotated[str, typer.Argument(help="Benchmark: digits, words, ocr, ..., or a YAML file.", metavar="NAME")],
    *,
    models: Annotated[
        list[str] | None, typer.Option("--model", help="RUN@EPOCH or a pipeline's folder.", metavar="MODEL")
    ] = None,
    against: Annotated[
        list[Path] | None, typer.Option("--against", help="Result file to compare with.", metavar="FILE")
    ] = None,
    prompts: Annotated[
        str | None, typer.Option("--prompts", help="Prompts, if the benchmark ships none.", metavar="FILE")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="For a folder: a config with its family.", metavar="CONFIG")
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder for result files.", metavar="FOLDER")] = Path("benchmarks"),
    processes: Annotated[
        int, typer.Option("--processes", min=1, help="Processes that share the work, a GPU each.", metavar="N")
    ] = 1,
    root: Root = None,
    trust_store: TrustStore = False,
    quiet: Quiet = False,
) -> None:
    """Measure models, write a result file each, and print them as a table.

    Raises:
        ConfigError: the benchmark, a model or a result cannot be used.
    """
    say(f"benchmark {name}", quiet=quiet)
    benchmark = load_benchmark(name, prompts=prompts)
    if not models and not against:
        raise ConfigError("Nothing to measure: give --model RUN@EPOCH, or a folder, at least once.")
    from flows.progress import display
    from tasks.reports.benchmark import find_subject, measure
    from tasks.reports.benchmark_results import read_result

    uri = default_root(root)
    results = [read_result(file) for file in against or ()]
    subjects = [find_subject(model, root=uri, config=config, trusted=trust_store) for model in models or ()]
    with display(quiet=quiet, epochs=1) as shown:
        for subject in subjects:
            results.append(measure(benchmark, subject, root=uri, reporter=shown, processes=processes))
    files = [result.write(out) for result in results[len(against or ()) :]]
    _print(results)
    for file in files:
        console.print(quoted(file))


def _print(results: Sequence[object]) -> None:
    from tasks.algorithms.resampling import FEWEST
    from tasks.reports.benchmark_results import Result, compare

    first, *others = (result for result in results if isinstance(result, Result))
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
