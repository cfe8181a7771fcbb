"""Runs whose stages this process carries out one after the other, without Prefect and MLflow."""

from __future__ import annotations

import resource

from configs.schema import RunConfig
from tasks.chain import evaluation_nodes
from tasks.context import RunContext
from tasks.runs import begin_run
from tasks.stage_run import StageRun
from tasks.stages import ONCE, make_stage


def prepare(config: RunConfig) -> RunContext:
    """Begin a run and make everything that comes before the first epoch."""
    context = begin_run(config)
    for name in ONCE:
        StageRun(make_stage(context, name, 0)).execute()
    return context


def run_epoch(context: RunContext, epoch: int) -> float:
    """Run the stages of one epoch; return the CPU seconds they took."""
    before = cpu()
    StageRun(make_stage(context, "rollout", epoch)).execute()
    for section in context.config.scored:
        StageRun(make_stage(context, "score", epoch, section.slot)).execute()
    for name in ("advantage", "optimize"):
        StageRun(make_stage(context, name, epoch)).execute()
    return cpu() - before


def evaluate(context: RunContext, epoch: int, name: str = "") -> None:
    """Evaluate the policy after an epoch: sample, and score with every reward and judge."""
    for node in evaluation_nodes(context.config, epoch, name):
        StageRun(context.chain.stage(node)).execute()


def cpu() -> float:
    """Return the CPU seconds of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
