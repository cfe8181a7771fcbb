"""``flowmill status``: runs, their fresh, stale and missing stages, and the reasons."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from configs.errors import ConfigError, TrustError
from configs.escaping import command
from flows.cli.error_reporting import brief, say
from flows.cli.filters import EntryFilter, ranges, span
from flows.cli.options import AsJson, Epochs, Long, Root, Stages
from flows.console import console, print_json, print_table
from flows.environment import existing_root

_STYLES = {"fresh": "green", "stale": "red", "missing": "yellow"}
_WORST = ("stale", "missing", "fresh")


def status_command(
    run: Annotated[str | None, typer.Argument(help="Run; all runs when absent.", metavar="[RUN]")] = None,
    *,
    why: Annotated[
        str | None, typer.Option("--why", help="Say why a stage is fresh, stale or missing.", metavar="STAGE@EPOCH")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 if any artifact is stale.")] = False,
    stage: Stages = None,
    epoch: Epochs = None,
    long: Long = False,
    root: Root = None,
    as_json: AsJson = False,
) -> None:
    """Print all runs, or one.

    Raises:
        ConfigError: ``why`` names no stage of the run, or an option needs a run.
    """
    uri = existing_root(root)
    say(f"reading {uri}", quiet=as_json)
    listed = EntryFilter(stages=stage or (), epochs=epoch or (), long=long)
    if run is None and why is not None:
        raise ConfigError("--why STAGE@EPOCH needs a run: flowmill status RUN --why score@3")
    if run is None and (listed.stages or listed.epochs):
        raise ConfigError("--stage and --epoch need a run: flowmill status RUN --stage score --epoch 3")
    with brief():
        if run is not None and why is not None:
            _explain(uri, run, why)
        else:
            _list(uri, run, listed, check=check, as_json=as_json)


def _list(uri: str, name: str | None, listed: EntryFilter, *, check: bool, as_json: bool) -> None:
    from storage.artifacts.commit import ArtifactStore
    from storage.artifacts.lineage import list_runs
    from tasks.metrics.describe import describe_run
    from tasks.runs.opening import open_run

    store = ArtifactStore(uri)

    def described(each: str) -> dict[str, Any]:
        return describe_run(open_run(store.root.uri, each, reads=True))

    runs = [_or_why_not(described, each) for each in list_runs(store)] if name is None else [described(name)]
    if name is not None:
        listed.check_stages(stage["stage"] for stage in runs[0]["stages"])
    shown = [_of_filter(run, listed) for run in runs]
    if as_json:
        keys = ("run", "state", "epochs", "finished_epochs")
        short = [{**{key: run[key] for key in keys}, "states": _counts(run["stages"])} for run in shown]
        print_json(short if name is None else shown[0])
    elif name is not None:
        _print_run(shown[0], listed)
    else:
        _print_runs(store.root.uri, shown, complete=listed.long)
    if check and any(stage["state"] == "stale" for run in runs for stage in run["stages"]):
        raise typer.Exit(1)


def _of_filter(run: dict[str, Any], listed: EntryFilter) -> dict[str, Any]:
    """Return a run's description restricted to the filtered stages and epochs."""
    entries: dict[str, Any] = {
        key: [each for each in run.get(key, ()) if listed.takes(each["stage"], [each["epoch"]])]
        for key in ("stages", "artifacts", "side_results")
        if key in run
    }
    if run.get("speed"):
        epoch, stages = run["speed"]["epoch"], run["speed"]["stages"]
        entries["speed"] = {
            "epoch": epoch,
            "stages": {stage: speed for stage, speed in stages.items() if listed.takes(stage, [epoch])},
        }
    if "evaluations" in run:
        judged = run["evaluations"].items()
        entries["evaluations"] = {epoch: made for epoch, made in judged if listed.takes("judge", [int(epoch)])}
        entries["named_evaluations"] = [
            each for each in run["named_evaluations"] if listed.takes("judge", [each["epoch"]])
        ]
    return {**run, **entries}


def _or_why_not(described: Callable[[str], dict[str, Any]], name: str) -> dict[str, Any]:
    """Return the description of one of several runs; an unreadable run does not hide the others."""
    try:
        return described(name)
    except (TrustError, ConfigError) as error:
        state = f"cannot be read: {str(error).partition(chr(10))[0]}"
        return {"run": name, "state": state, "epochs": None, "finished_epochs": None, "stages": [], "benchmark": None}


def _print_runs(uri: str, runs: Sequence[dict[str, Any]], *, complete: bool) -> None:
    if not runs:
        console.print(f"No runs in '{uri}'. Start one with 'flowmill run CONFIG'.")
        return
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
    print_table(table, cut=("state", "last evaluation"), complete=complete)


def _explain(root: str, name: str, why: str) -> None:
    from tasks.runs.opening import open_run
    from tasks.runs.staleness import explain
    from tasks.specs.graph import Node

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


def _print_run(run: dict[str, Any], listed: EntryFilter) -> None:
    counts = _counts(run["stages"])
    console.print(
        f"run {run['run']} in {run['root']}: {run['finished_epochs']} of {run['epochs']} epochs, {run['state']}",
        style="bold",
    )
    _print_stages(run["stages"])
    for stage in _roots(run["stages"]):
        label = f"{stage['stage']}{'[' + stage['slot'] + ']' if stage['slot'] else ''}@{stage['epoch']}"
        console.print(f"stale: {label}: {'; '.join(stage['causes'])}")
    if counts.get("stale"):
        why = command("flowmill", "status", run["run"], "--why", "STAGE@EPOCH")
        console.print(
            f"{counts['stale']} artifacts are stale; '{why}' says why, 'flowmill run' with the run's config computes "
            "them again."
        )
    for branch in run["branches"]:
        console.print(f"branch: {branch}")
    for warning in run["warnings"]:
        console.print(f"warning: {warning}", style="yellow")
    _print_evaluations(run, listed)
    if run["speed"]:
        from tasks.metrics.speed import in_words

        for stage, speed in run["speed"]["stages"].items():
            console.print(f"{stage} of epoch {run['speed']['epoch']}: {in_words(speed)}")
    _print_side_results(run, listed)
    _print_artifacts(run["artifacts"], listed)


def _print_artifacts(made: Sequence[Mapping[str, Any]], listed: EntryFilter) -> None:
    """Print the artifacts of the last epoch, or all requested ones, the newest first."""
    last = max((each["epoch"] for each in made), default=0)
    shown = [each for each in made if listed.long or listed.epochs or listed.stages or each["epoch"] == last]
    left_out = f" (--long lists {len(made) - len(shown)} more, of other epochs)" if len(made) > len(shown) else ""
    table = Table("epoch", "stage", "slot", "artifact", title=f"Artifacts{left_out}", title_justify="left")
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
    found = [state for state in _STYLES if any(state in of_epoch.values() for of_epoch in states.values())]
    table = Table("stage", *(f"{state} epochs" for state in found), title="Stages", title_justify="left")
    for name, of_epoch in states.items():
        epochs = {state: [epoch for epoch, each in of_epoch.items() if each == state] for state in found}
        table.add_row(name, *(Text(ranges(epochs[state]), _STYLES[state]) for state in found))
    print_table(table)


def _roots(stages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the stale stages that are root causes, without those that only depend on them."""
    own = [s for s in stages if s["state"] == "stale" and any(not c.startswith("input ") for c in s["causes"])]
    return own or [stage for stage in stages if stage["state"] == "stale"][:1]


def _print_evaluations(run: dict[str, Any], listed: EntryFilter) -> None:
    """Print the newest evaluations, the newest first, and one summary line per score of the earlier ones."""
    table = Table(
        "epoch", "evaluation", "prompts", "reward", "mean", "exact", title="Evaluations", title_justify="left"
    )
    found = sorted(((int(epoch), splits) for epoch, splits in run["evaluations"].items()), reverse=True, key=_first)
    recent = listed.recent(epoch for epoch, _ in found)
    for epoch, splits in found:
        if epoch in recent:
            _add_figures(table, epoch, "", splits)
    _add_sums(table, [each for each in found if each[0] not in recent])
    for named in sorted(run["named_evaluations"], key=lambda named: -int(named["epoch"])):
        _add_figures(table, named["epoch"], named["name"], named["figures"])
    if table.row_count:
        print_table(table)


def _first(pair: tuple[int, Any]) -> int:
    return pair[0]


def _add_figures(table: Table, epoch: int, name: str, splits: Mapping[str, Any]) -> None:
    for split, slot, values in _scores(splits):
        table.add_row(str(epoch), name, split, slot, *(_change([values], figure) for figure in ("mean", "exact")))


def _scores(splits: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, float]]]:
    return ((split, slot, values) for split, rewards in splits.items() for slot, values in rewards.items())


def _add_sums(table: Table, found: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
    """Add a row per score with its first and last value over some evaluations, given the last first."""
    over: dict[tuple[str, str], list[Mapping[str, float]]] = {}
    for _, splits in reversed(found):
        for split, slot, values in _scores(splits):
            over.setdefault((split, slot), []).append(values)
    epochs = span([epoch for epoch, _ in found])
    for (split, slot), course in over.items():
        table.add_row(epochs, "", split, slot, *(_change(course, figure) for figure in ("mean", "exact")))


def _change(values: Sequence[Mapping[str, float]], figure: str) -> str:
    found = [f"{each[figure]:.3f}" for each in values if figure in each]
    return " -> ".join(found if len(found) < 2 else (found[0], found[-1]))


def _print_side_results(run: dict[str, Any], listed: EntryFilter) -> None:
    if not run["side_results"]:
        return
    table = Table("epoch", "stage", "slot", "mean", "artifact", "reason", title="Side results")
    for made in sorted(run["side_results"], key=lambda made: -int(made["epoch"])):
        mean = f"{made['figures']['mean']:.3f}" if "mean" in made["figures"] else ""
        table.add_row(str(made["epoch"]), made["stage"], made["slot"], mean, made["artifact"], made["label"])
    print_table(table, cut=("reason",), complete=listed.long)


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
