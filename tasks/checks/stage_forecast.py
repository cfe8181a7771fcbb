"""Forecast of the work of a run: the stages it would compute, the reasons and the cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowmill.configs.schema import RunConfig
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.artifacts.lineage import RunFolder
from flowmill.tasks.runs.chain import Chain
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runs.locks import run_name
from flowmill.tasks.runs.opening import finished_result
from flowmill.tasks.runs.staleness import Freshness, StageStatus, statuses
from flowmill.tasks.specs.plan import RunPlan
from flowmill.tasks.specs.turns import last_turn

if TYPE_CHECKING:
    from flowmill.tasks.modalities.forward_cost import Cost


@dataclass(frozen=True, slots=True, kw_only=True)
class StageForecast:
    """One stage over all epochs."""

    stage: str
    fresh: int
    """Artifacts that are up to date."""
    reused: int
    """Artifacts of other runs that can be reused."""
    due: int
    rows: int | None
    """Maximum number of rows through policy, critic and base model; None for stages that run none of them."""
    seconds: float | None
    """Estimate from the times of this run so far; None before any."""
    reason: str
    """Reason why the first of them is due."""


def forecast(config: RunConfig, run: RunContext | None = None) -> tuple[StageForecast, ...]:
    """Return the work that ``flowmill run`` would do, by stage in order of execution.

    Args:
        run: the run, if it exists with these settings.
    """
    if run is not None and finished_result(run) is not None:
        # A finished run ends here too, without checking or loading anything.
        return _finished(config)
    from flowmill.tasks.checks.check import check_plan

    store = ArtifactStore(config.store)
    context = RunContext(store, config, RunFolder(store, run_name(config)))
    cost, chain = check_plan(context.plan, rewards=False), Chain(context)
    current = statuses(chain)
    names = list(dict.fromkeys(each.node.stage for each in current))
    of_stage = {name: [each for each in current if each.node.stage == name] for name in names}
    return tuple(_stage(chain, name, of_stage[name], cost) for name in names)


def _finished(config: RunConfig) -> tuple[StageForecast, ...]:
    counts = Counter(node.stage for node in RunPlan(config).nodes())
    return tuple(
        StageForecast(stage=name, fresh=count, reused=0, due=0, rows=None, seconds=None, reason="")
        for name, count in counts.items()
    )


def _stage(chain: Chain, name: str, of_stage: Sequence[StageStatus], cost: Cost) -> StageForecast:
    due = [each for each in of_stage if each.state is not Freshness.FRESH and not each.reusable]
    spent = [_seconds(chain, each) for each in of_stage if each.state is Freshness.FRESH]
    turns = last_turn(chain.config)
    per_artifact = {
        "rollout": cost.rollout_forwards // turns,
        "render": cost.drawing_forwards // turns,
        "depict": cost.depicting_forwards // turns,
        "optimize": cost.optimize_forwards + cost.reference_forwards,
        "value": cost.value_forwards,
        "validate": cost.validate_forwards,
        "evaluate": cost.evaluate_forwards // turns,
    }.get(name)
    return StageForecast(
        stage=name,
        fresh=sum(each.state is Freshness.FRESH for each in of_stage),
        reused=sum(each.state is not Freshness.FRESH and each.reusable for each in of_stage),
        due=len(due),
        rows=None if per_artifact is None or not due else per_artifact * len(due),
        seconds=sum(spent) / len(spent) * len(due) if spent and due else None,
        reason=_reason(due[0]) if due else "",
    )


def _seconds(chain: Chain, each: StageStatus) -> float:
    records = chain.store.records(chain.ref(each.node))
    return sum(float(record.producer.get("seconds", 0.0)) for record in records)


def _reason(first: StageStatus) -> str:
    if first.state is Freshness.MISSING:
        return f"{first.node} was not made yet"
    return f"{first.node}: " + "; ".join(cause.text for cause in first.causes)
