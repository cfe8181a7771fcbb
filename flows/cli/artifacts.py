"""``flowmill store ls``: the artifacts of a store, the newest epochs first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from flowmill.configs.human_units import duration, size
from flowmill.flows.cli.filters import EntryFilter, short_names, span
from flowmill.flows.console import console, print_json, print_table
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.maintenance.verify import list_artifacts
from flowmill.tasks.runs.opening import require_run

_COLUMNS = ("epoch", "stage", "artifact", "rows", "size", "state", "runs")
_LONG = ("epoch", "stage", "artifact", "shards", "rows", "size", "age", "state", "runs")


def list_command(store: ArtifactStore, runs: Sequence[str], listed: EntryFilter, *, as_json: bool) -> None:
    """Print one line for each artifact of the newest epochs, and one for each stage of earlier epochs.

    Args:
        runs: only artifacts of these runs; of all runs when empty.
        listed: filter of the entries.
        as_json: print JSON, of all epochs.
    """
    for name in runs:
        require_run(store, name)
    artifacts = list_artifacts(store, lambda artifact: listed.long or as_json)
    listed.check_stages(item["stage"] for item in artifacts)
    artifacts = [item for item in map(lambda each: _of_runs(each, runs), artifacts) if _taken(item, runs, listed)]
    if as_json:
        print_json(artifacts)
    elif artifacts:
        _print(artifacts, listed)
    else:
        console.print(f"No such artifacts in '{store.root.uri}'.")


def _of_runs(item: dict[str, Any], runs: Sequence[str]) -> dict[str, Any]:
    return {**item, "epochs": {run: epochs for run, epochs in item["epochs"].items() if not runs or run in runs}}


def _taken(item: dict[str, Any], runs: Sequence[str], listed: EntryFilter) -> bool:
    return (not runs or bool(item["epochs"])) and listed.takes(item["stage"], _epochs(item))


def _epochs(item: dict[str, Any]) -> set[int]:
    return {epoch for epochs in item["epochs"].values() for epoch in epochs}


def _print(artifacts: Sequence[dict[str, Any]], listed: EntryFilter) -> None:
    of_run: dict[str, set[int]] = {}
    for item in artifacts:
        for run, epochs in item["epochs"].items():
            of_run.setdefault(run, set()).update(epochs)
    recent = {(run, epoch) for run, epochs in of_run.items() for epoch in listed.recent(epochs)}
    ordered = sorted(artifacts, key=lambda item: -max(_epochs(item), default=-1))
    shown: list[dict[str, Any]] = []
    rest: list[dict[str, Any]] = []
    for item in ordered:
        uses = ((run, epoch) for run, epochs in item["epochs"].items() for epoch in epochs)
        (shown if listed.long or not recent.isdisjoint(uses) else rest).append(item)
    columns = _LONG if listed.long else _COLUMNS
    names = [item["artifact"] for item in artifacts]
    short = short_names(names) if console.is_terminal and not listed.long else dict(zip(names, names, strict=True))
    table = Table(*columns)
    for item in shown:
        _add(table, columns, {**item, "state": _state(item), "artifact": short[item["artifact"]]}, whole=listed.long)
    for group in _groups(rest):
        _add(table, columns, _together(group, short), whole=False)
    print_table(table, cut=("runs",), optional=("rows", "state", "size"), complete=listed.long)
    if rest:
        console.print(f"{len(rest)} artifacts are summarized; --long lists each.")


def _add(table: Table, columns: Sequence[str], item: dict[str, Any], *, whole: bool) -> None:
    age = "" if item["age_s"] is None else duration(item["age_s"])
    first, *others = item["runs"] or [""]
    runs = ", ".join(item["runs"]) if whole or not others else f"{first} +{len(others)}"
    cells = {**item, "epoch": span(_epochs(item)), "size": size(item["size"]), "age": age, "runs": runs}
    table.add_row(*(str(cells[column]) for column in columns))


def _state(item: dict[str, Any]) -> str:
    if item["removed"]:
        return "removed"
    return "grows" if item["artifact"].startswith("embeddings/") else ("incomplete", "complete")[item["complete"]]


def _groups(rest: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for item in rest:
        groups.setdefault((item["artifact"].partition("/")[0], item["stage"], _state(item)), []).append(item)
    return list(groups.values())


def _together(group: Sequence[dict[str, Any]], short: Mapping[str, str]) -> dict[str, Any]:
    """Return the sum of artifacts of one kind as one entry."""
    kind, one = group[0]["artifact"].partition("/")[0], short[group[0]["artifact"]]
    epochs: dict[str, list[int]] = {}
    for item in group:
        for run, each in item["epochs"].items():
            epochs.setdefault(run, []).extend(each)
    return {
        **group[0],
        **{key: sum(item[key] for item in group) for key in ("rows", "size", "shards")},
        "artifact": one if len(group) == 1 else f"{len(group)} {kind}",
        "age_s": None,
        "state": _state(group[0]),
        "epochs": epochs,
        "runs": sorted({run for item in group for run in item["runs"]}),
    }
