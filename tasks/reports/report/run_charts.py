"""The charts of a report: curves of one run, histograms, and curves of several runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from flowmill.tasks.metrics.tracked import ACHIEVED
from flowmill.tasks.reports.report import charts
from flowmill.tasks.reports.report.content import RunReport

if TYPE_CHECKING:
    from markupsafe import Markup

#: By section: title of a chart, patterns of its curves' keys, and the unit of its y axis.
_CHARTS: dict[str, Sequence[tuple[str, Sequence[str], str]]] = {
    "Rewards": (
        ("Evaluation: mean reward", ("eval/*_mean",), "reward"),
        ("Evaluation: exact match", ("eval/*_exact",), "share"),
        ("Reward of the rollouts", ("reward/mean", "reward/*_mean"), "reward"),
        ("Share of each reward in the variance within groups", ("reward/*_share",), "share"),
        ("Spread within groups", ("reward/std", "advantage/group_std"), "reward"),
        ("Groups without a signal", ("advantage/zero_std_ratio", "advantage/filtered_ratio"), "share"),
        ("Diversity within groups", ("advantage/diversity*",), ""),
    ),
    "Monitors": (
        ("Monitors", ("monitor/*_mean",), "score"),
        ("Correlation of monitors with the reward", ("monitor/*_correlation",), "correlation"),
    ),
    "Training": (
        ("Loss", ("optimize/loss",), "loss"),
        ("Loss on held-out rows", ("heldout/loss",), "loss"),
        ("Held-out rows in the right order", ("heldout/preferred",), "share"),
        (
            "Share of rows that train nothing, clipped as too far from the rollout's policy",
            ("optimize/clip_low", "optimize/clip_high"),
            "share",
        ),
        ("Ratio by step", ("optimize/ratio_step*",), "ratio"),
        ("KL to the base model, and to the rollout's policy", ("optimize/kl_base", "optimize/kl_epoch"), "nats"),
        ("Norm of the gradient", ("optimize/grad_norm",), "norm"),
        ("Learning rate", ("optimize/lr",), "per update"),
    ),
    "Speed": (
        (
            "Work of each epoch",
            tuple(f"time/{name}_s" for name in ("rollout", "score", "advantage", "optimize", "eval")),
            "s",
        ),
        ("Samples and rows of work", ("time/*_samples_per_s", "time/*_rows_per_s"), "per s"),
        ("Rate of the model", ("time/*_tflops_per_s",), "TFLOP/s"),
    ),
}
#: Curves for the comparison of several runs, one chart each.
_COMPARED = (
    "eval/heldout/*_mean",
    "eval/heldout/*_exact",
    "reward/mean",
    "monitor/*_mean",
    "optimize/kl_base",
    "time/optimize_s",
)


def progress(run: RunReport) -> Markup | str:
    """Return the small chart of the headline: the weighted reward of rollouts and evaluations."""
    names = {"heldout": "held-out prompts", "train": "train prompts", "rollout": "rollouts"}
    curves = {name: run.curves[f"{ACHIEVED}/{key}"] for key, name in names.items() if f"{ACHIEVED}/{key}" in run.curves}
    return charts.lines("Weighted reward", curves, along="epoch", unit="reward") if curves else ""


def sections_of(run: RunReport) -> dict[str, list[Markup]]:
    """Return the charts of each section that has any."""
    sections: dict[str, list[Markup]] = {}
    for section, entries in _CHARTS.items():
        for title, patterns, unit in entries:
            curves = {key.partition("/")[2]: run.curves[key] for key in _matching(run, patterns)}
            if curves:
                drawn = charts.lines(title, curves, along=_along(patterns[0]), unit=unit)
                sections.setdefault(section, []).append(drawn)
    for title, values, along in (
        ("Rewards of the first and the last epoch", run.rewards, "reward"),
        ("Standard deviations within their groups", run.spreads, "standard deviation"),
    ):
        if values:
            named = {f"epoch {epoch}": each for epoch, each in values.items()}
            sections.setdefault("Rewards", []).append(charts.histogram(title, named, along=along))
    return sections


def compared(runs: Sequence[RunReport]) -> Iterator[Markup]:
    """Yield a chart of each curve for the comparison of several runs."""
    if len(runs) < 2:
        return
    for key in dict.fromkeys(key for run in runs for key in _matching(run, _COMPARED)):
        yield charts.lines(key, {run.name: run.curves[key] for run in runs if key in run.curves}, along=_along(key))


def _along(key: str) -> str:
    return "update" if key.startswith("optimize/") else "epoch"


def _matching(run: RunReport, patterns: Sequence[str]) -> list[str]:
    keys = [key for pattern in patterns for key in sorted(run.curves) if fnmatchcase(key, pattern)]
    return list(dict.fromkeys(keys))
