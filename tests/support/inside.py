"""Runs whose stages this process carries out one after the other, without Prefect and MLflow."""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import pyarrow as pa

from flowmill.configs.schema import RunConfig
from flowmill.storage.artifacts.records import Manifest
from flowmill.storage.trajectories.base import TrajectoryShard
from flowmill.storage.trajectories.tables import read_rows
from flowmill.tasks.algorithms.base import Requirements
from flowmill.tasks.execution.session import Session
from flowmill.tasks.metrics.evaluations import texts
from flowmill.tasks.metrics.samples import shards_of
from flowmill.tasks.metrics.texts import Text
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runs.opening import begin_run
from flowmill.tasks.specs.graph import Node
from flowmill.tasks.specs.plan import RunPlan
from flowmill.tasks.stages.stage import Stage
from flowmill.tasks.stages.stage_run import StageRun
from flowmill.tasks.training.data import TrainingData

#: Returns the small config with overrides: the fixture ``make_config``.
Make = Callable[..., RunConfig]
_SESSIONS: WeakKeyDictionary[RunContext, Session] = WeakKeyDictionary()


def session_of(context: RunContext) -> Session:
    """Return what the stages of a run work with in this process; of one context always the same."""
    found = _SESSIONS.get(context)
    if found is None:
        found = _SESSIONS[context] = Session(context)
    return found


def plan_requiring(config: RunConfig, **needs: Any) -> RunPlan:
    """Return the plan of a config whose algorithm has these requirements."""
    plan = RunPlan(config)
    vars(plan)["algorithm"] = SimpleNamespace(requires=Requirements(**needs))
    return plan


def make_stage(context: RunContext, name: str, epoch: int, slot: str = "") -> Stage:
    """Return a stage with the models that this process has for its run."""
    return session_of(context).stage(Node(epoch, name, slot))


def stage_run(context: RunContext, name: str, epoch: int, slot: str = "", **options: Any) -> StageRun:
    """Return what carries out a stage in this process."""
    return StageRun(make_stage(context, name, epoch, slot), **options)


def run_stage(context: RunContext, name: str, epoch: int, slot: str = "", **options: Any) -> Manifest | None:
    """Carry out a stage in this process."""
    return stage_run(context, name, epoch, slot, **options).execute()


def prepare(config: RunConfig) -> RunContext:
    """Begin a run and make everything that comes before the first epoch."""
    context = begin_run(config)
    for node in RunPlan(config).setup():
        run_stage(context, node.stage, 0, node.slot)
    return context


def run_epoch(context: RunContext, epoch: int) -> float:
    """Run the stages of one epoch; return the CPU seconds they took."""
    before = cpu()
    for node in (*context.plan.scored(epoch), *context.plan.training(epoch)):
        run_stage(context, node.stage, epoch, node.slot)
    return cpu() - before


def evaluate(context: RunContext, epoch: int, name: str = "") -> None:
    """Evaluate the policy after an epoch: sample, and score with every reward and judge."""
    for node in context.plan.evaluation(epoch, name):
        run_stage(context, node.stage, node.epoch, node.slot)


def evaluation_texts(context: RunContext, epoch: int) -> dict[str, list[Text]]:
    """Return the first texts of an evaluation of each list, with the scores of its first reward."""
    return texts(context.store, context.chain.require(epoch, "judge", context.config.rewards[0].slot).ref)


def train(config: RunConfig) -> RunContext:
    """Carry out the epochs of a run, with evaluations before and after them."""
    context = prepare(config)
    evaluate(context, 0)
    for epoch in range(1, config.run.epochs + 1):
        run_epoch(context, epoch)
    evaluate(context, config.run.epochs)
    return context


def collect(context: RunContext, epoch: int = 1) -> None:
    """Carry out the samples, scores and advantages of an epoch."""
    for node in context.plan.scored(epoch):
        run_stage(context, node.stage, epoch, node.slot)
    run_stage(context, "advantage", epoch)


def training_data(context: RunContext, epoch: int = 1) -> TrainingData:
    """Return the data that the training of an epoch reads."""
    stage = make_stage(context, "optimize", epoch)
    return TrainingData(context, stage.modality, epoch, stage.inputs())


def summary_of(context: RunContext, epoch: int, stage: str, slot: str = "") -> Mapping[str, Any]:
    """Return the figures of a stage's artifact."""
    return context.store.require(context.chain.require(epoch, stage, slot).ref).summary


def updates_of(context: RunContext, epoch: int = 1) -> list[dict[str, float]]:
    """Return the figures of an epoch's updates."""
    updates: list[dict[str, float]] = context.store.require(context.policy_ref(epoch)).summary["updates"]
    return updates


def stage_rows(context: RunContext, epoch: int, stage: str, slot: str = "") -> pa.Table:
    """Return the table of scores, values or advantages that a stage made."""
    return read_rows(context.store, context.chain.require(epoch, stage, slot).ref)


def stored_shards(context: RunContext, epoch: int, stage: str, slot: str = "") -> list[TrajectoryShard]:
    """Return the opened shards of samples that a stage made, in order."""
    return list(shards_of(context.store, context.chain.require(epoch, stage, slot).ref))


def cpu() -> float:
    """Return the CPU seconds of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
