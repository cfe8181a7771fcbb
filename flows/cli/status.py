"""``flowmill status``: runs, what of them is fresh, stale or missing, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import typer
from rich.table import Table
from rich.text import Text

from configs.errors import ConfigError, TrustError
from configs.visible import command
from flows.console import console, print_json, print_table
from flows.environment import default_root
from storage.commit import ArtifactStore
from storage.lineage import list_runs
from tasks.figures.speed import in_words

_MARKS = {"fresh": Text("fresh", "green"), "stale": Text("STALE", "red"), "missing": Text("missing", "yellow")}
_WORST = ("stale", "missing", "fresh")


def status_command(name: str | None, *, root: str | None, why: str | None, check: bool, as_json: bool) -> None:
    """Print all runs, or one.

    Args:
        name: the run; all when None.
        root: the store.
        why: ``STAGE@EPOCH``: print the reasons for its state instead.
        check: end with 1 if anything is stale.
        as_json: print JSON.

    Raises:
        ConfigError: ``why`` names nothing.
    """
    store = ArtifactStore(default_root(root))
    if why is not None:
        if name is None:
            raise ConfigError("--why STAGE@EPOCH needs a run: flowmill status RUN --why score@3")
        _explain(store.root.uri, name, why)
        return
    from tasks.figures.describe import describe_run
    from tasks.runs.opening import open_run

    def described(each: str) -> dict[str, Any]:
        return describe_run(open_run(store.root.uri, each, reads=True))

    runs = [_or_why_not(described, each) for each in list_runs(store)] if name is None else [described(name)]
    _print(store, runs, one=name is not None, as_json=as_json)
    if check and any(stage["state"] == "stale" for run in runs for stage in run["stages"]):
        raise typer.Exit(1)


def _or_why_not(described: Callable[[str], dict[str, Any]], name: str) -> dict[str, Any]:
    """Return what there is to say of one of several runs: one that cannot be read hides no other."""
    try:
        return described(name)
    except (TrustError, ConfigError) as error:
        state = f"cannot be read: {str(error).partition(chr(10))[0]}"
        return {"run": name, "state": state, "epochs": None, "finished_epochs": None, "stages": [], "benchmark": None}


def _print(store: ArtifactStore, runs: Sequence[dict[str, Any]], *, one: bool, as_json: bool) -> None:
    if as_json:
        keys = ("run", "state", "epochs", "finished_epochs")
        short = [{**{key: run[key] for key in keys}, "states": _counts(run["stages"])} for run in runs]
        print_json(runs[0] if one else short)
    elif one:
        _print_run(runs[0])
    elif not runs:
        console.print(f"No runs in '{store.root.uri}'. Start one with 'flowmill run CONFIG'.")
    else:
        table = Table("run", "epochs", "state", "last evaluation")
        for run in runs:
            if run["benchmark"] is not None:
                table.add_row(run["run"], "", "benchmark", run["benchmark"])
                continue
            if run["epochs"] is None:
                table.add_row(run["run"], "", run["state"], "")
                continue
            epochs = f"{run['finished_epochs']} of {run['epochs']}"
            table.add_row(run["run"], epochs, _state(run), _last_figures(run))
        print_table(table, folding=("state", "last evaluation"))


def _explain(root: str, name: str, why: str) -> None:
    from tasks.identities.nodes import Node
    from tasks.runs.opening import open_run
    from tasks.runs.staleness import explain

    stage, _, place = why.partition("@")
    epoch = place or "0"
    if not epoch.isdigit():
        raise ConfigError(f"--why '{why}': '{epoch}' is no epoch. Write STAGE@EPOCH, such as score@3.")
    stage, _, slot = stage.rstrip("]").partition("[")
    chain = open_run(root, name, reads=True).chain
    nodes = [node for node in chain.nodes() if node[:2] == (int(epoch), stage) and slot in ("", node.slot)]
    if not nodes:
        stages = ", ".join(dict.fromkeys(node.stage for node in chain.nodes() if node.epoch == int(epoch)))
        has = f"At epoch {epoch} it has {stages}." if stages else f"It has epochs 0 to {chain.config.run.epochs}."
        raise ConfigError(f"--why '{why}': run '{name}' has no such stage. {has}")
    for node in nodes:
        for line in explain(chain, Node(*node)):
            console.print(line)


def _print_run(run: dict[str, Any]) -> None:
    counts = _counts(run["stages"])
    console.print(
        f"run {run['run']} in {run['root']}: {run['finished_epochs']} of {run['epochs']} epochs, {run['state']}",
        style="bold",
    )
    print_table(_grid(run["stages"]))
    for stage in _roots(run["stages"]):
        label = f"{stage['stage']}{'[' + stage['slot'] + ']' if stage['slot'] else ''}@{stage['epoch']}"
        console.print(f"stale: {label}: {'; '.join(stage['causes'])}")
    if counts.get("stale"):
        why = command("flowmill", "status", run["run"], "--why", "STAGE@EPOCH")
        console.print(
            f"{counts['stale']} artifacts are stale; '{why}' says why, 'flowmill run' with the run's config makes them "
            "anew."
        )
    for warning in run["warnings"]:
        console.print(f"warning: {warning}", style="yellow")
    _print_evaluations(run)
    if run["speed"]:
        for stage, speed in run["speed"]["stages"].items():
            console.print(f"{stage} of epoch {run['speed']['epoch']}: {in_words(speed)}")
    _print_side_results(run)
    _print_artifacts(run["artifacts"])


def _print_artifacts(made: Sequence[Mapping[str, Any]]) -> None:
    """Print those of the first and the last epoch: those of all are for programs, not for eyes."""
    last = max((each["epoch"] for each in made), default=0)
    shown = [each for each in made if each["epoch"] in (0, last)]
    left_out = f" ({len(made) - len(shown)} of the epochs between: --json)" if len(made) > len(shown) else ""
    table = Table("epoch", "stage", "slot", "artifact", title=f"Artifacts{left_out}", title_justify="left")
    for each in shown:
        table.add_row(str(each["epoch"]), each["stage"], each["slot"], each["artifact"])
    print_table(table)


def _grid(stages: Sequence[Mapping[str, Any]]) -> Table:
    """Return epochs by stages; neighboring epochs that are alike share a row."""
    columns = list(dict.fromkeys(stage["stage"] for stage in stages))
    states: dict[int, dict[str, str]] = {}
    for stage in stages:
        row = states.setdefault(stage["epoch"], {})
        row[stage["stage"]] = min(row.get(stage["stage"], "fresh"), stage["state"], key=_WORST.index)
    table = Table("epoch", *columns, title="Stages", title_justify="left")
    rows: list[tuple[int, int, dict[str, str]]] = []
    for epoch, row in sorted(states.items()):
        if rows and rows[-1][2] == row and rows[-1][1] == epoch - 1:
            rows[-1] = (rows[-1][0], epoch, row)
        else:
            rows.append((epoch, epoch, row))
    for first, last, row in rows:
        place = str(first) if first == last else f"{first}-{last}"
        table.add_row(place, *(_MARKS[row[column]] if column in row else "" for column in columns))
    return table


def _roots(stages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return stale stages with a reason of their own, beside those that follow from them."""
    own = [s for s in stages if s["state"] == "stale" and any(not c.startswith("input ") for c in s["causes"])]
    return own or [stage for stage in stages if stage["state"] == "stale"][:1]


def _print_evaluations(run: dict[str, Any]) -> None:
    table = Table(
        "epoch", "evaluation", "prompts", "reward", "mean", "exact", title="Evaluations", title_justify="left"
    )
    for epoch, splits in sorted(run["evaluations"].items(), key=lambda item: int(item[0])):
        _add_figures(table, epoch, "", splits)
    for named in run["named_evaluations"]:
        _add_figures(table, str(named["epoch"]), named["name"], named["figures"])
    print_table(table)


def _add_figures(table: Table, epoch: str, name: str, splits: Mapping[str, Any]) -> None:
    for split, rewards in splits.items():
        for slot, values in rewards.items():
            exact = f"{values['exact']:.3f}" if "exact" in values else ""
            table.add_row(epoch, name, split, slot, f"{values['mean']:.3f}", exact)


def _print_side_results(run: dict[str, Any]) -> None:
    if not run["side_results"]:
        return
    table = Table("epoch", "stage", "slot", "mean", "artifact", "beside the run because", title="Side results")
    table.title_justify = "left"
    for made in run["side_results"]:
        mean = f"{made['figures']['mean']:.3f}" if "mean" in made["figures"] else ""
        table.add_row(str(made["epoch"]), made["stage"], made["slot"], mean, made["artifact"], made["label"])
    print_table(table, folding=("beside the run because",))


def _counts(stages: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    states = [stage["state"] for stage in stages]
    return {state: states.count(state) for state in _WORST if state in states}


def _state(run: Mapping[str, Any]) -> str:
    stale = _counts(run["stages"]).get("stale")
    return str(run["state"]) + (f", {stale} stale" if stale else "")


def _last_figures(run: dict[str, Any]) -> str:
    evaluations = run["evaluations"]
    if not evaluations:
        return ""
    last = max(evaluations, key=int)
    figures = [
        f"{split} {slot} {values['mean']:.3f}"
        for split, rewards in evaluations[last].items()
        for slot, values in rewards.items()
    ]
    return f"epoch {last}: " + ", ".join(figures)
