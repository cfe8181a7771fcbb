"""The pipeline: which stage follows which. No arithmetic and no tensors here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from prefect import flow
from prefect.exceptions import TerminationSignal
from prefect.states import Cancelled
from prefect.task_runners import ThreadPoolTaskRunner

from configs.errors import CancelledError
from flows import runtime
from flows.artifacts import Progress, evaluation_table, flow_run_tags, tracking_link
from flows.cancellation import check_cancelled
from flows.stages import execute, submit, work
from tasks.chain import evaluation_nodes
from tasks.check import is_evaluated
from tasks.export.stage import ExportStage
from tasks.figures import evaluation_figures
from tasks.rollout import RolloutStage
from tasks.runs import executing, mark_finished
from tasks.score import ScoreStage
from tasks.stage import Shard, StageRun
from tasks.stages import make_stage
from tasks.tracking.tracker import Tracker
from tasks.workspace import Workspace


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
    return carry_out(runtime.workspace(root, run))


def carry_out(workspace: Workspace) -> Any:
    """Execute a run: hold its lock, train, track, and say how it ended."""
    with executing(workspace):
        tracker = Tracker(workspace, orchestrator=flow_run_tags())
        status = "FAILED"
        try:
            train(workspace, tracker)
            status = "FINISHED"
        except CancelledError as error:
            status = "KILLED"
            return Cancelled(message=str(error))
        except (KeyboardInterrupt, SystemExit, TerminationSignal):
            status = "KILLED"
            raise
        finally:
            tracker.close(status)
        mark_finished(workspace)
    return workspace.chain.digest()


def train(workspace: Workspace, tracker: Tracker) -> None:
    """Chain the stages over all epochs."""
    config = workspace.config
    prepare(workspace)
    evaluate(workspace, tracker, epoch=0)
    tracking_link(workspace.run.name, workspace.store.root.uri, tracker.url())
    progress = Progress()
    for epoch in range(1, config.run.epochs + 1):
        rollout_and_score(workspace, epoch)
        execute(make_stage(workspace, "advantage", epoch))
        execute(make_stage(workspace, "optimize", epoch))
        tracker.log_epoch(epoch)
        if is_evaluated(config, epoch):
            evaluate(workspace, tracker, epoch=epoch)
        progress.update(epoch, config.run.epochs)
        workspace.reporter.progress("pipeline", epoch, epoch, config.run.epochs)
    export(workspace, tracker, epoch=config.run.epochs)


def prepare(workspace: Workspace) -> None:
    """Base model, embeddings, prompts, first policy."""
    for name in ("base", "encode", "preprocess", "policy"):
        execute(make_stage(workspace, name, 0))


def rollout_and_score(workspace: Workspace, epoch: int) -> None:
    """Roll out shard by shard, and score each shard while the next one is being rolled out."""
    stage = RolloutStage(workspace, epoch)
    rollout = StageRun(stage)
    scores = [StageRun(ScoreStage(workspace, epoch, section.slot, stage)) for section in workspace.config.rewards]
    for run in (rollout, *scores):
        runtime.keep_stage(run.stage)
    left = {run.stage.slot: {shard.name: shard for shard in run.pending()} for run in scores if not run.complete}
    futures: list[Any] = []

    def score(shard_name: str) -> None:
        for run in scores:
            shard: Shard | None = left.get(run.stage.slot, {}).get(shard_name)
            if shard is not None:
                futures.append(submit(run, shard))

    for record in workspace.store.records(rollout.ref):
        score(record.shard)
    if not rollout.complete:
        work(rollout, on_commit=score)
    rollout.finish()
    for future in futures:
        check_cancelled()
        future.result()
    for run in scores:
        run.finish()


def evaluate(workspace: Workspace, tracker: Tracker, *, epoch: int) -> None:
    """Sample with the policy after an epoch, score the images, and show the figures."""
    for node in evaluation_nodes(workspace.config, epoch):
        execute(workspace.chain.stage(node))
    tracker.log_evaluation(epoch)
    evaluation_table(workspace.run.name, epoch, evaluation_figures(workspace.chain, epoch))


def export(workspace: Workspace, tracker: Tracker, *, epoch: int) -> None:
    """Write the model for diffusers and register it."""
    execute(ExportStage(workspace, epoch))
    tracker.log_export(epoch)


def with_score_workers(workers: int) -> Callable[..., Any]:
    """Return the pipeline flow with as many scoring threads."""
    runner: Any = ThreadPoolTaskRunner(max_workers=workers)
    return pipeline.with_options(task_runner=runner)
