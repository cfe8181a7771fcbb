"""The pipeline: the order of the stages. It contains no arithmetic and no tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from prefect import flow
from prefect.runtime import flow_run

from flowmill.configs.errors import StoppedError
from flowmill.flows import process_state
from flowmill.flows.artifacts import flow_run_tags
from flowmill.flows.callbacks import RunCallbacks
from flowmill.flows.cancellation import was_stopped
from flowmill.flows.chained import chained, resolved_config
from flowmill.flows.requests import ContinueRequest, PipelineRequest
from flowmill.flows.rollouts import Rollouts
from flowmill.flows.scheduled_runs import make_up_for_missed, scheduled, turn
from flowmill.flows.stages import run_stage
from flowmill.tasks.checks.check import check_plan
from flowmill.tasks.execution.session import Session
from flowmill.tasks.metrics.describe import describe_result
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runs.extension import grown
from flowmill.tasks.runs.locks import executing
from flowmill.tasks.runs.opening import bind_run, mark_finished, open_run
from flowmill.tasks.runs.state import note_state
from flowmill.tasks.specs.graph import Node
from flowmill.tasks.specs.plan import RunPlan
from flowmill.tasks.tracking.tracker import Tracker


@flow(name="pipeline", flow_run_name=process_state.flow_run_name, persist_result=False)
def pipeline(request: PipelineRequest) -> Any:
    """Run or continue a training run, after those that it starts from by their configs."""
    with scheduled(request) as result:
        make_up_for_missed()
        for each in chained(request):
            run, begun = bind_run(resolved_config(each)), partial(_begun, each)
            with at_turn(run, each, begun) as context, training_run(context, each) as (session, callbacks):
                train(session, callbacks)
            result.value = session.context.chain.digest()
    return result.value


@flow(name="continue", flow_run_name=process_state.flow_run_name, persist_result=False)
def bring_up_to_date(request: ContinueRequest) -> Any:
    """Complete a run under the config it was last started with: compute its missing and stale artifacts."""
    with scheduled(request) as result:
        make_up_for_missed()
        run = open_run(request.root, request.run, reads=True, trusted=request.trust_store)
        begun = partial(
            open_run, request.root, request.run, reporter=process_state.reporter(), trusted=request.trust_store
        )
        with at_turn(run, request, begun) as context, training_run(context, request) as (session, callbacks):
            train(session, callbacks)
        result.value = session.context.chain.digest()
    return result.value


def _begun(request: PipelineRequest) -> RunContext:
    return process_state.begin(process_state.configured(request, says=True))


@contextlib.contextmanager
def at_turn(
    run: RunContext, request: PipelineRequest | ContinueRequest, begun: Callable[[], RunContext]
) -> Iterator[RunContext]:
    """Yield the result of ``begun`` once no other process executes the run, and keep others from executing it inside.

    Before, the other process may still change the length and the config of the run.
    """
    with turn(run, request):
        yield begun()


@contextlib.contextmanager
def training_run(
    context: RunContext, request: PipelineRequest | ContinueRequest
) -> Iterator[tuple[Session, RunCallbacks]]:
    """Yield the session and callbacks of a run for training: hold its lock, track it, and record its final state."""
    with contextlib.ExitStack() as stack:
        context = grown(context, request.advance)
        check_plan(context.plan, rewards=False)
        stack.enter_context(executing(context))
        note_state(context, "running", flow_run=str(flow_run.id or ""))
        session = stack.enter_context(process_state.opened(context))
        tracker = Tracker(context, orchestrator=flow_run_tags())
        callbacks, status = RunCallbacks(context, tracker, show=request.show), "FAILED"
        try:
            yield session, callbacks
            status = "FINISHED"
        except BaseException as error:
            if was_stopped(error):
                status = "KILLED"
            by_alert = isinstance(error, StoppedError)
            note_state(context, "held" if by_alert else "stopped" if status == "KILLED" else "failed", error)
            raise
        finally:
            tracker.close(status)
        mark_finished(context, describe_result(context))
        note_state(context, "done")
        callbacks.report()


def train(session: Session, callbacks: RunCallbacks) -> None:
    """Chain the stages over all epochs."""
    plan = session.context.plan
    for node in plan.setup():
        run_stage(session, node)
    evaluate(session, callbacks, plan, epoch=0)
    rollouts = Rollouts(session)
    for epoch in range(1, plan.config.run.epochs + 1):
        rollouts.complete(epoch)
        for node in plan.training(epoch):
            run_stage(session, node)
        callbacks.trained(epoch)
        if plan.is_evaluated(epoch):
            evaluate(session, callbacks, plan, epoch=epoch)
        callbacks.ended(epoch)
    export, _ = run_stage(session, Node(plan.config.run.epochs, "export"))
    callbacks.exported(plan.config.run.epochs, str(export))


def evaluate(session: Session, callbacks: RunCallbacks, plan: RunPlan, *, epoch: int) -> None:
    """Sample with the policy after an epoch, score the samples, and show the figures."""
    for node in plan.evaluation(epoch):
        run_stage(session, node)
    callbacks.evaluated(epoch)
