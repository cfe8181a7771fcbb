"""The pipeline: which stage follows which. No arithmetic and no tensors here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prefect import flow
from prefect.states import Cancelled

from configs.errors import CancelledError
from flows import runtime
from flows.artifacts import Progress, evaluation_table, flow_run_tags, tracking_link
from flows.cancellation import signal_behind
from flows.rollouts import Rollouts
from flows.stages import execute
from tasks.chain import evaluation_nodes
from tasks.check import is_evaluated
from tasks.context import RunContext
from tasks.figures import evaluation_figures
from tasks.runs import executing, mark_finished, open_run
from tasks.stages import make_stage
from tasks.stages.export import ExportStage
from tasks.tracking.tracker import Tracker
from tasks.watch import new_suspicions


@flow(name="pipeline", flow_run_name="{name}", persist_result=False, validate_parameters=False)
def pipeline(config: str, root: str | None = None, name: str | None = None, overrides: Sequence[str] = ()) -> Any:
    """Run or continue a training run.

    Args:
        config: path of the config file.
        root: folder of the store; the config's when absent.
        name: name of the run; the config's, else the file's name, when absent.
        overrides: ``section.key=value`` strings.
    """
    return carry_out(runtime.begin(runtime.configured(config, root, name, overrides)))


@flow(name="continue", flow_run_name="{run}", persist_result=False, validate_parameters=False)
def bring_up_to_date(run: str, root: str = "flowmill-store") -> Any:
    """Do what a run lacks under the config it was last started with: what is missing, and what is stale.

    Args:
        run: name of the run.
        root: folder of the store.
    """
    return carry_out(open_run(root, run, reporter=runtime.reporter()))


def carry_out(context: RunContext) -> Any:
    """Execute a run: hold its lock, train, track, and say how it ended."""
    with executing(context), runtime.opened(context):
        tracker = Tracker(context, orchestrator=flow_run_tags())
        status = "FAILED"
        try:
            train(context, tracker)
            status = "FINISHED"
        except CancelledError as error:
            status = "KILLED"
            return Cancelled(message=str(error))
        except BaseException as error:
            if signal_behind(error) is not None:
                status = "KILLED"
            raise
        finally:
            tracker.close(status)
        mark_finished(context)
    return context.chain.digest()


def train(context: RunContext, tracker: Tracker) -> None:
    """Chain the stages over all epochs."""
    config = context.config
    prepare(context)
    evaluate(context, tracker, epoch=0)
    tracking_link(context.run.name, context.store.root.uri, tracker.url())
    progress, rollouts = Progress(), Rollouts(context)
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
        context.reporter.progress("pipeline", epoch, epoch, config.run.epochs)
    export(context, tracker, epoch=config.run.epochs)


def warn(context: RunContext, epoch: int) -> None:
    """Say what monitors show since this epoch."""
    for found in new_suspicions(context.chain, epoch):
        context.reporter.message(f"warning: {found.text()}")


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


def export(context: RunContext, tracker: Tracker, *, epoch: int) -> None:
    """Write the model for diffusers and register it."""
    execute(ExportStage(context, epoch))
    tracker.log_export(epoch)
