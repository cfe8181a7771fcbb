"""The report as one self-contained HTML file, which fetches no resources."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from configs.escaping import visible
from configs.human_units import duration, size
from tasks.reports.report import charts
from tasks.reports.report.content import RunReport

#: Title of a chart, patterns of its curves' keys, and the label of its x axis.
_CHARTS: Sequence[tuple[str, Sequence[str], str]] = (
    ("Evaluation: mean reward", ("eval/*_mean",), "epoch"),
    ("Evaluation: exact match", ("eval/*_exact",), "epoch"),
    ("Reward of the rollouts", ("reward/mean", "reward/*_mean"), "epoch"),
    ("Share of each reward in the variance within groups", ("reward/*_share",), "epoch"),
    ("Monitors", ("monitor/*_mean",), "epoch"),
    ("Correlation of monitors with the reward", ("monitor/*_correlation",), "epoch"),
    ("Spread within groups", ("reward/std", "advantage/group_std"), "epoch"),
    ("Groups without a signal", ("advantage/zero_std_ratio", "advantage/filtered_ratio"), "epoch"),
    ("Diversity within groups", ("advantage/diversity*",), "epoch"),
    ("Loss", ("optimize/loss",), "update"),
    ("Clipped share of rows", ("optimize/clip_low", "optimize/clip_high"), "update"),
    ("Ratio by step", ("optimize/ratio_step*",), "update"),
    ("KL to the base model, and to the rollout's policy", ("optimize/kl", "optimize/approx_kl"), "update"),
    ("Norm of the gradient", ("optimize/grad_norm",), "update"),
    ("Learning rate", ("optimize/lr",), "update"),
    (
        "Seconds of work of each epoch",
        ("time/rollout_s", "time/score_s", "time/advantage_s", "time/optimize_s", "time/eval_s"),
        "epoch",
    ),
    ("Samples and rows per second of work", ("time/*_samples_per_s", "time/*_rows_per_s"), "epoch"),
    ("TFLOP/s of the model", ("time/*_tflops_per_s",), "epoch"),
)
#: Curves for the comparison of several runs, one chart each.
_COMPARED = (
    "eval/heldout/*_mean",
    "eval/heldout/*_exact",
    "reward/mean",
    "monitor/*_mean",
    "optimize/kl",
    "time/optimize_s",
)


def page(runs: Sequence[RunReport], *, price: float | None = None) -> str:
    """Return the HTML of a report of one or several runs.

    Args:
        runs: the runs.
        price: price of an hour of work, to show the cost of a run.
    """
    environment = Environment(
        loader=PackageLoader("tasks.reports.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        finalize=_shown,
    )
    environment.filters |= {"png": _png, "mp4": _mp4, "bytes": size, "duration": duration}
    return environment.get_template("report.html").render(
        runs=runs,
        title=" and ".join(run.name for run in runs),
        price=price,
        differing=_differing(runs),
        compared=[Markup(svg) for svg in _compared(runs)],
        charts={run.name: [Markup(svg) for svg in _charts(run)] for run in runs},
    )


def _charts(run: RunReport) -> Iterator[str]:
    for title, patterns, along in _CHARTS:
        found = {key: run.curves[key] for key in _matching(run, patterns)}
        if found:
            yield charts.lines(title, {key.partition("/")[2]: points for key, points in found.items()}, along=along)
    for title, values, along in (
        ("Rewards of the first and the last epoch", run.rewards, "reward"),
        ("Standard deviations within their groups", run.spreads, "standard deviation"),
    ):
        if values:
            yield charts.histogram(title, {f"epoch {epoch}": each for epoch, each in values.items()}, along=along)


def _compared(runs: Sequence[RunReport]) -> Iterator[str]:
    if len(runs) < 2:
        return
    for key in dict.fromkeys(key for run in runs for key in _matching(run, _COMPARED)):
        along = "update" if key.startswith("optimize/") else "epoch"
        yield charts.lines(key, {run.name: run.curves[key] for run in runs if key in run.curves}, along=along)


def _matching(run: RunReport, patterns: Sequence[str]) -> list[str]:
    found = [key for pattern in patterns for key in sorted(run.curves) if fnmatchcase(key, pattern)]
    return list(dict.fromkeys(found))


def _differing(runs: Sequence[RunReport]) -> list[tuple[str, list[Any]]]:
    """Return the settings in which runs differ, with the value of each."""
    keys = sorted({key for run in runs for key in run.settings if key != "run.name"})
    rows = [(key, [run.settings.get(key, "") for run in runs]) for key in keys]
    return [(key, values) for key, values in rows if any(value != values[0] for value in values)]


def _shown(value: Any) -> Any:
    """Return a value with control characters made visible; Jinja escapes only HTML."""
    return visible(value, keep="\n\t") if isinstance(value, str) and not isinstance(value, Markup) else value


def _png(image: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


def _mp4(film: bytes) -> str:
    return f"data:video/mp4;base64,{base64.b64encode(film).decode()}"
