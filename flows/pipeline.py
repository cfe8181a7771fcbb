"""The pipeline: which stage follows which. No arithmetic and no tensors here."""

from __future__ import annotations

import contextlib
from typing import Any

from prefect import flow

from configs.errors import CancelledError, TrackingError
from flows import runtime
from flows.artifacts import (
    EpochTable,
    Progress,
    announce,
    evaluation_images,
    evaluation_table,
    flow_run_tags,
    report_link,
    tracking_link,
)
from flows.cancellation import signal_behind
from flows.requests import ContinueRequest, PipelineRequest
from flows.rollouts import Rollouts
from flows.schedules import scheduled, turn
from flows.server import has_lasting_api
from flows.stages import execute
from tasks.advance import grown
from tasks.chain import evaluation_nodes, is_evaluated
from tasks.context import RunContext
from tasks.earnings import earned
from tasks.figures import evaluation_figures, evaluation_grids
from tasks.report import run_report
from tasks.runs import executing, mark_finished, open_run
from tasks.stages import make_stage
from tasks.stages.export import ExportStage
from tasks.tracking.reports import log_report
from tasks.tracking.tracker import Tracker
from tasks.watch import new_suspicions


@flow(name="pipeline", flow_run_name=runtime.flow_run_name, persist_result=False)
@scheduled
def pipeline(request: PipelineRequest) -> Any:
    """Run or continue a training run."""
    config = runtime.configured(request.config, request.root, request.name, request.overrides)
    return carry_out(runtime.begin(config), request)


@flow(name="continue", flow_run_name=runtime.flow_run_name, persist_result=False)
@scheduled
def bring_up_to_date(request: ContinueRequest) -> Any:
    """Do what a run lacks under the config it was last started with: what is missing, and what is stale."""
    context = open_run(request.root, request.run, reporter=runtime.reporter(), trusted=request.trust_store)
    return carry_out(context, request)


def carry_out(context: RunContext, request: PipelineRequest | ContinueRequest) -> Any:
    """Execute a run: hold its lock, train, track, and say how it ended."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(turn(context, request))
        context = grown(context, request.advance)
        stack.enter_context(executing(context))
        stack.enter_context(runtime.opened(context))
        tracker = Tracker(context, orchestrator=flow_run_tags())
        status = "FAILED"
        try:
            train(context, tracker)
            status = "FINISHED"
        except BaseException as error:
            if isinstance(error, CancelledError) or signal_behind(error) is not None:
                status = "KILLED"
            raise
        finally:
            tracker.close(status)
        mark_finished(context)
        report(context, tracker)
    return context.chain.digest()


def train(context: RunContext, tracker: Tracker) -> None:
    """Chain the stages over all epochs."""
    config = context.config
    prepare(context)
    evaluate(context, tracker, epoch=0)
    tracking_link(context.run.name, context.store.root.uri, tracker.url())
    progress, table, rollouts = Progress(), EpochTable(context), Rollouts(context)
    for epoch in range(1, config.run.epochs + 1):
        context.begin_epoch()
        rollouts.complete(epoch)
        execute(make_stage(context, "advantage", epoch))
        execute(make_stage(context, "optimize", epoch))
        tracker.log_epoch(epoch)
        warn(context, epoch)
        if is_evaluated(config, epoch):
            evaluate(context, tracker, epoch=epoch)
        progress.update(epoch, config.run.epochs)
        table.update(epoch, last=epoch == config.run.epochs)
        context.reporter.progress("pipeline", epoch, epoch, config.run.epochs, earned(context.chain, epoch))
    export(context, tracker, epoch=config.run.epochs)


def warn(context: RunContext, epoch: int) -> None:
    """Say what monitors show since this epoch."""
    for found in new_suspicions(context.chain, epoch):
        context.reporter.message(f"warning: {found.text()}")
        announce("suspicion", context.run.name, monitor=found.monitor, epoch=epoch, text=found.text())


def prepare(context: RunContext) -> None:
    """Base model, embeddings, prompts, first policy."""
    for name in ("base", "encode", "preprocess", "policy"):
        execute(make_stage(context, name, 0))


def evaluate(context: RunContext, tracker: Tracker, *, epoch: int) -> None:
    """Sample with the policy after an epoch, score the images, and show the figures."""
    for node in evaluation_nodes(context.config, epoch):
        execute(context.chain.stage(node))
    tracker.log_evaluation(epoch)
    evaluation_table(context.run.name, epoch, evaluation_figures(context.chain, epoch))
    evaluation_images(context.run.name, epoch, evaluation_grids(context.chain, epoch))


def export(context: RunContext, tracker: Tracker, *, epoch: int) -> None:
    """Write the model for diffusers and register it."""
    execute(ExportStage(context, epoch))
    tracker.log_export(epoch)
    announce("exported", context.run.name, epoch=epoch)


def report(context: RunContext, tracker: Tracker) -> None:
    """Log the run's report, if it is to have one, and show where it is."""
    wanted = context.config.tracking.report
    if has_lasting_api() if wanted is None else wanted:
        try:
            log_report(context, run_report(context))
        except TrackingError as error:
            context.reporter.message(str(error))
            return
        report_link(context.run.name, context.store.root.uri, tracker.url())
