"""The report as one self-contained HTML file, which fetches no resources.

Its style sheet and its only script are files of this folder. The browser runs no other script: the page names the hash
of this one.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from configs.escaping import visible
from configs.human_units import duration, size
from tasks.metrics.points import ACHIEVED
from tasks.reports.report import charts
from tasks.reports.report.content import RunReport

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
        ("Clipped share of rows", ("optimize/clip_low", "optimize/clip_high"), "share"),
        ("Ratio by step", ("optimize/ratio_step*",), "ratio"),
        ("KL to the base model, and to the rollout's policy", ("optimize/kl", "optimize/approx_kl"), "nats"),
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
    "optimize/kl",
    "time/optimize_s",
)
#: The parts of a text that are compared: words, punctuation marks, spaces.
_PARTS = re.compile(r"\w+|\s+|[^\w\s]")


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
        lstrip_blocks=True,
        finalize=_shown,
    )
    environment.filters |= {"url": _url, "bytes": size, "duration": duration}
    script, style = ((files("tasks.reports.report") / name).read_text("utf-8") for name in ("report.js", "report.css"))
    return environment.get_template("report.html").render(
        runs=runs,
        title=" and ".join(run.name for run in runs),
        price=price,
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        style=Markup(style),
        differing=_differing(runs),
        compared=list(_compared(runs)),
        charts={run.name: _charts(run) for run in runs},
        progress={run.name: _progress(run) for run in runs},
        marked=_marked,
    )


def _progress(run: RunReport) -> Markup | str:
    """Return the small chart of the headline: the weighted reward of rollouts and evaluations."""
    names = {"heldout": "held-out prompts", "train": "train prompts", "rollout": "rollouts"}
    found = {name: run.curves[f"{ACHIEVED}/{key}"] for key, name in names.items() if f"{ACHIEVED}/{key}" in run.curves}
    return charts.lines("Weighted reward", found, along="epoch", unit="reward") if found else ""


def _charts(run: RunReport) -> dict[str, list[Markup]]:
    """Return the charts of each section that has any."""
    sections: dict[str, list[Markup]] = {}
    for section, entries in _CHARTS.items():
        for title, patterns, unit in entries:
            found = {key.partition("/")[2]: run.curves[key] for key in _matching(run, patterns)}
            if found:
                drawn = charts.lines(title, found, along=_along(patterns[0]), unit=unit)
                sections.setdefault(section, []).append(drawn)
    for title, values, along in (
        ("Rewards of the first and the last epoch", run.rewards, "reward"),
        ("Standard deviations within their groups", run.spreads, "standard deviation"),
    ):
        if values:
            named = {f"epoch {epoch}": each for epoch, each in values.items()}
            sections.setdefault("Rewards", []).append(charts.histogram(title, named, along=along))
    return sections


def _compared(runs: Sequence[RunReport]) -> Iterator[Markup]:
    if len(runs) < 2:
        return
    for key in dict.fromkeys(key for run in runs for key in _matching(run, _COMPARED)):
        yield charts.lines(key, {run.name: run.curves[key] for run in runs if key in run.curves}, along=_along(key))


def _along(key: str) -> str:
    return "update" if key.startswith("optimize/") else "epoch"


def _matching(run: RunReport, patterns: Sequence[str]) -> list[str]:
    found = [key for pattern in patterns for key in sorted(run.curves) if fnmatchcase(key, pattern)]
    return list(dict.fromkeys(found))


def _differing(runs: Sequence[RunReport]) -> list[tuple[str, list[Any]]]:
    """Return the settings in which runs differ, with the value of each."""
    keys = sorted({key for run in runs for key in run.settings if key != "run.name"})
    rows = [(key, [run.settings.get(key, "") for run in runs]) for key in keys]
    return [(key, values) for key, values in rows if any(value != values[0] for value in values)]


def _marked(before: str, after: str) -> tuple[Markup, Markup]:
    """Return two texts with the words that only one of them has marked as ``del`` and ``ins``."""
    old, new = (_PARTS.findall(_shown(text)) for text in (before, after))
    one, other = Markup(), Markup()
    for kind, a, b, c, d in SequenceMatcher(None, old, new).get_opcodes():
        left, right = "".join(old[a:b]), "".join(new[c:d])
        one += left if kind == "equal" or not left else Markup("<del>{}</del>").format(left)
        other += right if kind == "equal" or not right else Markup("<ins>{}</ins>").format(right)
    return one, other


def _shown(value: Any) -> Any:
    """Return a value with control characters made visible; Jinja escapes only HTML."""
    return visible(value, keep="\n\t") if isinstance(value, str) and not isinstance(value, Markup) else value


def _url(data: bytes) -> str:
    """Return a PNG, a WebP or an mp4 as a data URL."""
    kind = "image/png" if data[1:4] == b"PNG" else "image/webp" if data[8:12] == b"WEBP" else "video/mp4"
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
