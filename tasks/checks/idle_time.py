"""Estimates from the config which share of a stage's time its processes spend waiting for the last one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from flowmill.configs.load import override_config
from flowmill.configs.schema import RunConfig
from flowmill.models.rewards.factory import scored_by_ranks
from flowmill.tasks.modalities.forward_cost import Cost
from flowmill.tasks.runs.sharding import encoding_cuts, evaluation_cuts, idle_share, rollout_cuts
from flowmill.tasks.specs.plan import RunPlan

#: Idle share from which a stage gets a note.
_MUCH = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """Idle time of a stage."""

    stage: str
    parts: int
    """Number of shards, or of micro-batches per update."""
    share: float
    """Share of process time spent waiting or computing padding, for equally fast processes."""


class Dealt(NamedTuple):
    """The work of a stage that the processes of a run divide."""

    ends: Sequence[int]
    """End of each part, in samples."""
    batch: int
    times: int = 1
    """Number of repetitions of the whole work."""


def idle_shares(plan: RunPlan, cost: Cost) -> list[Idle]:
    """Return the idle time of every stage that the processes of a run divide, in order of execution."""
    config, encode = plan.config, sum(cost.prompts.values()) if plan.modality.encodes else 0
    by_ranks = partial(scored_by_ranks, nodes=config.execution.nodes)
    on_ranks = {
        "encode": encode > 0,
        "score": any(map(by_ranks, config.scored)),
        "judge": any(map(by_ranks, (*config.rewards, *config.evaluate.judges))),
    }
    return [_idle(config, cost, stage) for stage in _DEALT if on_ranks.get(stage, True)]


def _idle(config: RunConfig, cost: Cost, stage: str) -> Idle:
    dealt = _DEALT[stage](config, cost)
    share = idle_share(dealt.ends, batch=dealt.batch, ranks=_processes(config, stage), times=dealt.times)
    return Idle(stage=stage, parts=len(dealt.ends) * dealt.times, share=max(0.0, share))


def idle_notes(config: RunConfig, cost: Cost, parts: Sequence[Idle]) -> list[str]:
    """Return notes on stages with an idle share of a tenth or more, each with a better batch size if there is one."""
    return [_note(config, cost, idle) for idle in parts if idle.share >= _MUCH and idle.stage in _BATCHES]


def _note(config: RunConfig, cost: Cost, idle: Idle) -> str:
    setting, name = _BATCHES[idle.stage], _BATCHES[idle.stage].rpartition(".")[2]
    processes, size = _processes(config, idle.stage), getattr(config.execution, name)
    label = "micro-batches of an update" if idle.stage == "optimize" else "shards"
    now = {stage: _idle(config, cost, stage).share for stage, of in _BATCHES.items() if of == setting}
    better = next(_better(config, cost, setting, {**now, idle.stage: 0.0}), None)
    remedy = "There is too little to do for so many." if better is None else f"With {better} it is less than a tenth."
    return (
        f"{idle.stage}: {idle.share:.0%} of the time of {processes} processes makes nothing: they wait for the last of "
        f"its {idle.parts} {label}, or compute rows that pad, with {setting} {size}. {remedy}"
    )


def _better(config: RunConfig, cost: Cost, setting: str, now: Mapping[str, float]) -> Iterator[int]:
    """Yield smaller batch sizes, largest first, with a small idle share, or one no larger than now."""
    for smaller in range(getattr(config.execution, setting.rpartition(".")[2]) - 1, 0, -1):
        other = override_config(config, [f"{setting}={smaller}"])
        if all(_idle(other, cost, stage).share <= max(share, _MUCH - 1e-9) for stage, share in now.items()):
            yield smaller


def _processes(config: RunConfig, stage: str) -> int:
    execution = config.execution
    return execution.ranks // (execution.context_parallel if stage == "optimize" else 1)


def _optimized(config: RunConfig, cost: Cost) -> Dealt:
    """Return the micro-batches of an update; ``notes.padding_notes`` covers their padding."""
    rows = cost.optimize_rows * config.run.epochs / max(1, cost.updates)
    return Dealt(range(1, math.ceil(rows / config.execution.micro_batch_size) + 1), 1)


def _evaluated(config: RunConfig, cost: Cost, batch: int) -> Dealt:
    return Dealt(evaluation_cuts(config), batch, sum(cost.prompts[split] > 0 for split in ("train", "heldout")))


#: The divided work of each stage, in order of execution.
_DEALT: Mapping[str, Callable[[RunConfig, Cost], Dealt]] = {
    "encode": lambda config, cost: Dealt(encoding_cuts(sum(cost.prompts.values())), config.execution.encode_batch_size),
    "rollout": lambda config, cost: Dealt(rollout_cuts(config), config.execution.rollout_batch_size),
    "score": lambda config, cost: Dealt(rollout_cuts(config), 1),
    "optimize": _optimized,
    "evaluate": lambda config, cost: _evaluated(config, cost, config.execution.rollout_batch_size),
    "judge": lambda config, cost: _evaluated(config, cost, 1),
}
#: Batch size settings of the stages that get notes.
_BATCHES = {
    "rollout": "execution.rollout_batch_size",
    "optimize": "execution.micro_batch_size",
    "evaluate": "execution.rollout_batch_size",
}
