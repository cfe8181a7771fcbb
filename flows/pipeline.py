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
from tasks.execution.execution import Execution
from tasks.figures.describe import describe_result
from tasks.figures.earnings import earned
from tasks.figures.evaluations import evaluation_figures, evaluation_grids
from tasks.figures.watch import new_suspicions
from tasks.identities.nodes import ONCE, evaluation_nodes, is_evaluated
from tasks.preflight.check import check_config
from tasks.review.report import run_report
from tasks.runs.advance import grown
from tasks.runs.chain import Chain
from tasks.runs.context import RunContext
from tasks.runs.opening import executing, mark_finished, open_run
from tasks.runs.progress import Reporter
from tasks.tracking.reports import log_report
from tasks.tracking.tracker import Tracker


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
        check_config(context.config, rewards=False)
        stack.enter_context(executing(context))
        execution = stack.enter_context(runtime.opened(context))
        tracker = Tracker(context, orchestrator=flow_run_tags())
        status = "FAILED"
        try:
            train(execution, tracker)
            status = "FINISHED"
        except BaseException as error:
            if isinstance(error, CancelledError) or signal_behind(error) is not None:
                status = "KILLED"
            raise
        finally:
            tracker.close(status)
        mark_finished(context, describe_result(context))
        report(context, tracker)
    return context.chain.digest()


def train(execution: Execution, tracker: Tracker) -> None:
    """Chain the stages over all epochs."""
    context = execution.context
    config, chain, run = context.config, context.chain, context.run.name
    prepare(execution)
    evaluate(execution, tracker, epoch=0)
    tracking_link(run, context.store.root.uri, tracker.url())
    progress, table, rollouts = Progress(), EpochTable(run, chain), Rollouts(execution)
    for epoch in range(1, config.run.epochs + 1):
        execution.begin_epoch()
        rollouts.complete(epoch)
        execute(execution.stage("advantage", epoch), execution)
        execute(execution.stage("optimize", epoch), execution)
        tracker.log_epoch(epoch)
        warn(chain, context.reporter, epoch)
        if is_evaluated(config, epoch):
            evaluate(execution, tracker, epoch=epoch)
        progress.update(epoch, config.run.epochs)
        table.update(epoch, last=epoch == config.run.epochs)
        context.reporter.progress("pipeline", epoch, epoch, config.run.epochs, earned(chain, epoch))
    export(execution, tracker, epoch=config.run.epochs)


def warn(chain: Chain, reporter: Reporter, epoch: int) -> None:
    """Say what monitors show since this epoch."""
    for found in new_suspicions(chain, epoch):
        reporter.message(f"warning: {found.text()}")
        announce("suspicion", chain.run.name, monitor=found.monitor, epoch=epoch, text=found.text())


def prepare(execution: Execution) -> None:
    """Base model, embeddings, prompts, first policy."""
    for name in ONCE:
        execute(execution.stage(name, 0), execution)


def evaluate(execution: Execution, tracker: Tracker, *, epoch: int) -> None:
    """Sample with the policy after an epoch, score the samples, and show the figures."""
    chain = execution.context.chain
    for node in evaluation_nodes(chain.config, epoch):
        execute(execution.stage(node.stage, node.epoch, node.slot), execution)
    tracker.log_evaluation(epoch)
    evaluation_table(chain.run.name, epoch, evaluation_figures(chain, epoch))
    evaluation_images(chain.run.name, epoch, evaluation_grids(chain, epoch))


def export(execution: Execution, tracker: Tracker, *, epoch: int) -> None:
    """Write the model for other libraries and register it."""
    execute(execution.stage("export", epoch), execution)
    tracker.log_export(epoch)
    announce("exported", execution.context.run.name, epoch=epoch)


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
