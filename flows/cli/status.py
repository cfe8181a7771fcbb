"""``flowmill status``: runs, their fresh, stale and missing stages, and the reasons."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain as joined
from typing import Annotated, Any

import typer

from flowmill.configs.errors import ConfigError, FlowmillError
from flowmill.configs.gc_tuning import without_collecting
from flowmill.flows.cli.error_reporting import say
from flowmill.flows.cli.filters import EntryFilter
from flowmill.flows.cli.options import AsJson, Epochs, Long, Root, Stages, TrustStore
from flowmill.flows.cli.status_tables import counts, print_run, print_runs
from flowmill.flows.console import console, print_json
from flowmill.flows.environment import existing_root


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
    trust_store: TrustStore = False,
    as_json: AsJson = False,
) -> None:
    """Print all runs, or one."""
    uri = existing_root(root)
    say(f"reading {uri}", quiet=as_json)
    listed = EntryFilter(stages=stage or (), epochs=epoch or (), long=long)
    if run is None and why is not None:
        raise ConfigError("--why STAGE@EPOCH needs a run: flowmill status RUN --why score@3")
    if run is None and (listed.stages or listed.epochs):
        raise ConfigError("--stage and --epoch need a run: flowmill status RUN --stage score --epoch 3")
    if why is not None and (check or listed.stages or listed.epochs):
        raise ConfigError("--why is of one stage: leave out --check, --stage and --epoch, which list them.")
    with without_collecting():
        if run is not None and why is not None:
            _explain(uri, run, why, trusted=trust_store, as_json=as_json)
        else:
            _list(uri, run, listed, check=check, trusted=trust_store, as_json=as_json)


def _list(uri: str, name: str | None, listed: EntryFilter, *, check: bool, trusted: bool, as_json: bool) -> None:
    from flowmill.storage.artifacts.commit import ArtifactStore
    from flowmill.storage.artifacts.lineage import list_runs
    from flowmill.tasks.metrics.describe import describe_run
    from flowmill.tasks.runs.opening import open_run

    store = ArtifactStore(uri)

    def described(each: str) -> dict[str, Any]:
        return describe_run(open_run(store.root.uri, each, reads=True, trusted=trusted))

    read = partial(_or_why_not, described)
    runs = store.root.map(read, list_runs(store)) if name is None else [described(name)]
    if name is not None:
        listed.check_stages(stage["stage"] for stage in runs[0]["stages"])
    shown = [_of_filter(run, listed) for run in runs]
    if as_json:
        keys = ("run", "state", "epochs", "finished_epochs")
        short = [{**{key: run[key] for key in keys}, "states": counts(run["stages"])} for run in shown]
        print_json(short if name is None else shown[0])
    elif name is not None:
        print_run(shown[0], listed)
    else:
        print_runs(store.root.uri, shown, complete=listed.long)
    # Whether artifacts of an unreadable run are stale is unknown.
    unread = any(run["epochs"] is None for run in runs)
    if check and (unread or any(stage["state"] == "stale" for run in runs for stage in run["stages"])):
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
        entries["evaluations"] = {epoch: splits for epoch, splits in judged if listed.takes("judge", [int(epoch)])}
        entries["named_evaluations"] = [
            each for each in run["named_evaluations"] if listed.takes("judge", [each["epoch"]])
        ]
    return {**run, **entries}


def _or_why_not(described: Callable[[str], dict[str, Any]], name: str) -> dict[str, Any]:
    """Return the description of one of several runs; an unreadable run does not hide the others."""
    try:
        return described(name)
    except FlowmillError as error:
        state = f"cannot be read: {str(error).partition(chr(10))[0]}"
        return {"run": name, "state": state, "epochs": None, "finished_epochs": None, "stages": []}


def _explain(root: str, name: str, why: str, *, trusted: bool, as_json: bool) -> None:
    from flowmill.tasks.runs.opening import open_run
    from flowmill.tasks.runs.staleness import explain
    from flowmill.tasks.specs.graph import Node

    stage, _, place = why.partition("@")
    epoch = place or "0"
    if not epoch.isdecimal():
        raise ConfigError(f"--why '{why}': '{epoch}' is no epoch. Write STAGE@EPOCH, such as score@3.")
    stage, _, slot = stage.rstrip("]").partition("[")
    chain = open_run(root, name, reads=True, trusted=trusted).chain
    nodes = [node for node in chain.nodes() if node[:2] == (int(epoch), stage) and slot in ("", node.slot)]
    if not nodes:
        stages = ", ".join(dict.fromkeys(node.stage for node in chain.nodes() if node.epoch == int(epoch)))
        has = f"At epoch {epoch} it has {stages}." if stages else f"It has epochs 0 to {chain.config.run.epochs}."
        raise ConfigError(f"--why '{why}': run '{name}' has no such stage. {has}")
    reasons = {str(Node(*node)): explain(chain, Node(*node)) for node in nodes}
    if as_json:
        print_json(reasons)
        return
    for line in joined.from_iterable(reasons.values()):
        console.print(line)
