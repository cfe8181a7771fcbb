"""The tables of ``flowmill status``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from flowmill.configs.escaping import command
from flowmill.configs.roots import root_option
from flowmill.flows.cli.filters import EntryFilter, ranges, span
from flowmill.flows.console import console, print_table
from flowmill.tasks.runs.staleness import Freshness

_STYLES = {"fresh": "green", "stale": "red", "missing": "yellow"}
_WORST = ("stale", "missing", "fresh")
#: Figures on held-out rows that the table of evaluations has.
_LOSSES = ("loss", "preferred", "margin")


def print_runs(uri: str, runs: Sequence[Mapping[str, Any]], *, complete: bool) -> None:
    """Print a line for each run of a store."""
    if not runs:
        console.print(f"No runs in '{uri}'. Start one with 'flowmill run CONFIG'.")
        return
    table = Table("run", "epochs", "state", "last evaluation")
    for run in runs:
        if run["epochs"] is None:
            cells = ["", run["state"], ""]
        else:
            stale = counts(run["stages"]).get("stale")
            state = f"{run['state']}, {stale} stale" if stale else run["state"]
            cells = [f"{run['finished_epochs']} of {run['epochs']}", state, last_figures(run)]
        table.add_row(run["run"], *cells)
    print_table(table, cut=("state", "last evaluation"), complete=complete)


def print_run(run: Mapping[str, Any], listed: EntryFilter) -> None:
    """Print one run, as ``flowmill.tasks.metrics.describe.describe_run`` describes it."""
    stale = counts(run["stages"]).get("stale")
    console.print(
        f"run {run['run']} in {run['root']}: {run['finished_epochs']} of {run['epochs']} epochs, {run['state']}",
        style="bold",
    )
    if run["start"] is not None:
        console.print(f"started from {run['start']['run']}: {run['start']['policy']}")
    _print_stages(run["stages"])
    for stage in _roots(run["stages"]):
        label = f"{stage['stage']}{'[' + stage['slot'] + ']' if stage['slot'] else ''}@{stage['epoch']}"
        console.print(f"stale: {label}: {'; '.join(stage['causes'])}")
    if stale:
        why = command("flowmill", "status", run["run"], "--why", "STAGE@EPOCH", *root_option(run["root"]))
        console.print(
            f"{stale} artifacts are stale; '{why}' says why, 'flowmill run' with the run's config computes them again."
        )
    if run["data"] is not None:
        rows, samples, refused = (run["data"][name] for name in ("rows", "samples", "refused"))
        console.print(f"data: {samples} samples of {rows} rows, {refused} rows left out")
    for warning in run["warnings"]:
        console.print(f"warning: {warning}", style="yellow")
    _print_evaluations(run, listed)
    if run["speed"]:
        from flowmill.tasks.metrics.speed import in_words

        for stage, speed in run["speed"]["stages"].items():
            console.print(f"{stage} of epoch {run['speed']['epoch']}: {in_words(speed)}")
    _print_side_results(run, listed)
    _print_artifacts(run["artifacts"], listed)


def _print_artifacts(artifacts: Sequence[Mapping[str, Any]], listed: EntryFilter) -> None:
    """Print the artifacts of the last epoch, or all requested ones, the newest first."""
    last = max((each["epoch"] for each in artifacts), default=0)
    shown = [each for each in artifacts if listed.long or listed.epochs or listed.stages or each["epoch"] == last]
    left_out = (
        f" (--long lists {len(artifacts) - len(shown)} more, of other epochs)" if len(artifacts) > len(shown) else ""
    )
    table = Table("epoch", "stage", "of", "artifact", title=f"Artifacts{left_out}")
    for each in sorted(shown, key=lambda each: -int(each["epoch"])):
        table.add_row(str(each["epoch"]), each["stage"], each["slot"], each["artifact"])
    if shown:
        print_table(table)


def _print_stages(stages: Sequence[Mapping[str, Any]]) -> None:
    """Print the fresh, stale and missing epochs of each stage; an epoch has the state of its worst slot."""
    states: dict[str, dict[int, str]] = {}
    for stage in stages:
        of_epoch = states.setdefault(stage["stage"], {})
        of_epoch[stage["epoch"]] = min(of_epoch.get(stage["epoch"], "fresh"), stage["state"], key=_WORST.index)
    present = [state for state in _STYLES if any(state in of_epoch.values() for of_epoch in states.values())]
    title = f"Stages ({'; '.join(f'{state}: {Freshness(state).meaning}' for state in present)})"
    table = Table("stage", *(f"{state} epochs" for state in present), title=title)
    for name, of_epoch in states.items():
        epochs = {state: [epoch for epoch, each in of_epoch.items() if each == state] for state in present}
        table.add_row(name, *(Text(ranges(epochs[state]), _STYLES[state]) for state in present))
    print_table(table)


def _roots(stages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the stale stages that are root causes, without those that only depend on them."""
    own = [s for s in stages if s["state"] == "stale" and any(not c.startswith("input ") for c in s["causes"])]
    return own or [stage for stage in stages if stage["state"] == "stale"][:1]


def _print_evaluations(run: Mapping[str, Any], listed: EntryFilter) -> None:
    """Print the newest evaluations, the newest first, and one summary line per score of the earlier ones."""
    table = Table("epoch", "evaluation", "prompts", "reward", "mean", "exact", title="Evaluations")
    evaluations = {int(epoch): {**splits, **_losses(run, epoch)} for epoch, splits in run["evaluations"].items()}
    recent = listed.recent(evaluations)
    for epoch in sorted(recent, reverse=True):
        _add_scores(table, str(epoch), "", [evaluations[epoch]])
    earlier = sorted(set(evaluations) - recent)
    _add_scores(table, span(earlier), "", [evaluations[epoch] for epoch in earlier])
    for named in sorted(run["named_evaluations"], key=lambda named: -int(named["epoch"])):
        _add_scores(table, str(named["epoch"]), named["name"], [named["figures"]])
    if table.row_count:
        print_table(table)


def _losses(run: Mapping[str, Any], epoch: str) -> dict[str, dict[str, dict[str, float]]]:
    """Return the figures of an evaluation on held-out rows, in the form of its scores; none without such rows."""
    figures = {name: {"mean": value} for name, value in run["losses"].get(epoch, {}).items() if name in _LOSSES}
    return {"held-out rows": figures} if figures else {}


def _add_scores(table: Table, epochs: str, name: str, evaluations: Sequence[Mapping[str, Any]]) -> None:
    """Add a row per score with its first and its last value over evaluations in the order of their epochs."""
    over: dict[tuple[str, str], list[Mapping[str, float]]] = {}
    for splits in evaluations:
        for split, rewards in splits.items():
            for slot, values in rewards.items():
                over.setdefault((split, slot), []).append(values)
    for (split, slot), course in over.items():
        table.add_row(epochs, name, split, slot, *(change(course, figure) for figure in ("mean", "exact")))


def change(values: Sequence[Mapping[str, float]], figure: str) -> str:
    """Return the first and the last value of a figure in text; empty without any."""
    numbers = [f"{each[figure]:.3f}" for each in values if figure in each]
    return " -> ".join(numbers if len(numbers) < 2 else (numbers[0], numbers[-1]))


def _print_side_results(run: Mapping[str, Any], listed: EntryFilter) -> None:
    if not run["side_results"]:
        return
    title = "Side results: made with other settings or from other inputs than the run's"
    table = Table("epoch", "stage", "of", "mean", "artifact", "reason", title=title)
    for side in sorted(run["side_results"], key=lambda side: -int(side["epoch"])):
        mean = f"{side['figures']['mean']:.3f}" if "mean" in side["figures"] else ""
        table.add_row(str(side["epoch"]), side["stage"], side["slot"], mean, side["artifact"], side["label"])
    print_table(table, cut=("reason",), complete=listed.long)


def counts(stages: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the numbers of stale, missing and fresh stages."""
    states = [stage["state"] for stage in stages]
    return {state: states.count(state) for state in _WORST if state in states}


def last_figures(run: Mapping[str, Any]) -> str:
    """Return the scores of the last evaluation of a run in text."""
    evaluations = run["evaluations"]
    if not evaluations:
        return ""
    last = max(evaluations, key=int)
    figures = [
        f"{split} {slot} {values['mean']:.3f}" if "mean" in values else f"{split} {slot} failed"
        for split, rewards in evaluations[last].items()
        for slot, values in rewards.items()
    ]
    return f"epoch {last}: " + ", ".join(figures)
