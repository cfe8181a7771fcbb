"""Reads the content of a report from committed artifacts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import yaml

from flowmill.configs.escaping import command
from flowmill.configs.load import asks_for
from flowmill.configs.paths import portable
from flowmill.configs.roots import root_option
from flowmill.tasks.metrics.alerts import alerts
from flowmill.tasks.metrics.evaluations import weighted_bounds, weighted_rewards
from flowmill.tasks.metrics.speed import epoch_speeds, in_words
from flowmill.tasks.metrics.tracked import paragraphs
from flowmill.tasks.metrics.view import RunView
from flowmill.tasks.reports.data_tables import data_tables
from flowmill.tasks.reports.report.content import Curve, RunReport, StageCost
from flowmill.tasks.reports.report.headline import evaluated, headline
from flowmill.tasks.reports.report.samples import extremes, ingested_shots, pairs
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runs.staleness import Freshness
from flowmill.tasks.specs.graph import Node


def read_run(context: RunContext) -> RunReport:
    """Read the report content of a run."""
    view, config = RunView(context), context.config
    context.store.remember(map(view.chain.ref, view.chain.nodes()), records=True)
    trained, evaluations = view.trained, view.evaluations
    last, of_epochs = max(evaluations, default=0), trained[:: max(1, len(trained) - 1)]
    # The rewards of ingested samples are their ratings, which training does not change.
    tables = {} if context.plan.has_data else {epoch: view.scores(epoch) for epoch in of_epochs}
    best, worst = extremes(view, of_epochs[-1], tables[of_epochs[-1]]) if tables else ([], [])
    before, after = evaluated(view, 0), evaluated(view, last)
    figures = evaluations.get(0, {}), evaluations.get(last, {})
    first, final = (weighted_rewards(config, each) for each in figures)
    paired, changed = pairs(view, last, before, after)
    exported, lineage = view.chain.find(config.run.epochs, "export"), view.lineage().to_pylist()
    values, root = portable(config.model_dump(mode="json")), portable(root_option(context.store.root.uri))
    return RunReport(
        name=context.run.name,
        epochs=(trained[-1] if trained else 0, config.run.epochs),
        description=paragraphs(context, done=False)[0],
        reward=" + ".join(each.weighted for each in config.rewards),
        headline=headline(first, final, before.values(), after.values(), weighted_bounds(config)) if last else None,
        export=(
            exported.artifact if exported is not None else "",
            command("flowmill", "export", context.run.name, "--to", f"{context.run.name}-model", *root),
        ),
        warnings=[alert.text for alert in alerts(view.chain)],
        curves=_curves(view),
        results=(last, *figures),
        judges=[section.slot for section in config.evaluate.judges],
        pairs=paired,
        changed=changed,
        data=data_tables(context),
        ingested=ingested_shots(view),
        best=best,
        worst=worst,
        rewards={epoch: _valid(table, "reward") for epoch, table in tables.items()},
        spreads={epoch: _spreads(table) for epoch, table in tables.items()},
        states=Counter(Freshness(row["state"]).meaning for row in lineage),
        stale=[f"{_node(row)}: {row['why']}" for row in lineage if row["state"] == "stale"],
        costs=_costs(view, trained[-1] if trained else 0),
        lineage=[
            (_node(row), row["artifact"], row["inputs"])
            for row in lineage
            if row["artifact"] is not None and row["epoch"] in (0, *of_epochs[-1:])
        ],
        config=yaml.safe_dump(values, sort_keys=False, allow_unicode=True),
        settings=asks_for(values),
    )


def _node(row: Mapping[str, Any]) -> str:
    return str(Node(row["epoch"], row["stage"], row["slot"]))


def _curves(view: RunView) -> dict[str, Curve]:
    curves: dict[str, Curve] = {}
    for point in view.curves().to_pylist():
        curves.setdefault(point["key"], []).append((point["step"], point["value"]))
    return curves


def _valid(table: pa.Table, column: str) -> np.ndarray:
    return np.asarray(table.column(column).drop_null().to_numpy(), np.float64)


def _spreads(table: pa.Table) -> np.ndarray:
    grouped = table.filter(table.column("reward").is_valid()).group_by("group_id").aggregate([("reward", "stddev")])
    return np.asarray(grouped.column("reward_stddev").to_numpy(), np.float64)


def _costs(view: RunView, epoch: int) -> list[StageCost]:
    speeds, costs = epoch_speeds(view.chain, epoch), dict[str, list[dict[str, Any]]]()
    for row in view.costs().to_pylist():
        costs.setdefault(row["stage"], []).append(row)
    return [
        StageCost(
            stage=stage,
            artifacts=len(rows),
            seconds=sum(row["seconds"] for row in rows),
            size=sum(row["size"] for row in rows),
            speed=in_words(speeds.get(stage, {})),
        )
        for stage, rows in costs.items()
    ]
