"""``flowmill benchmark``: models on pinned samples, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from configs.benchmark import load_benchmark
from configs.errors import ConfigError
from configs.escaping import quoted
from flows.console import console, print_table
from flows.environment import default_root
from flows.progress import display

if TYPE_CHECKING:
    from tasks.algorithms.resampling import Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkRequest:
    """Settings of a measurement."""

    name: str
    """Benchmark, or its file."""
    models: Sequence[str]
    """RUN@EPOCH or folders; the others are compared with the first."""
    against: Sequence[Path]
    """Result files of earlier measurements, listed before the models."""
    prompts: str | None
    """Prompts that replace the benchmark's."""
    config: Path | None
    """Config of models that are folders."""
    out: Path
    """Folder for the results."""
    processes: int = 1
    """Number of processes on this machine that share the work."""
    trust_store: bool = False
    """Run code that only the store names."""


def benchmark_command(request: BenchmarkRequest, *, root: str | None, quiet: bool) -> None:
    """Measure models, write a result file each, and print them as a table.

    Raises:
        ConfigError: the benchmark, a model or a result cannot be used.
    """
    benchmark = load_benchmark(request.name, prompts=request.prompts)
    if not request.models and not request.against:
        raise ConfigError("Nothing to measure: give --model RUN@EPOCH, or a folder, at least once.")
    from tasks.reports.benchmark import find_subject, measure
    from tasks.reports.benchmark_results import read_result

    uri = default_root(root)
    results = [read_result(file) for file in request.against]
    subjects = [
        find_subject(model, root=uri, config=request.config, trusted=request.trust_store) for model in request.models
    ]
    with display(quiet=quiet, epochs=1) as shown:
        for subject in subjects:
            results.append(measure(benchmark, subject, root=uri, reporter=shown, processes=request.processes))
    files = [result.write(request.out) for result in results[len(request.against) :]]
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
