"""A sweep: variants of a run, one after the other in this process, or concurrently in separate processes."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.task_runners import ThreadPoolTaskRunner

from flowmill.configs.errors import CancelledError, WorkerError
from flowmill.configs.load import override_config
from flowmill.configs.schema import RunConfig
from flowmill.flows import process_state
from flowmill.flows.callbacks import report_of
from flowmill.flows.cancellation import cancels_parts, check_cancelled, signal_behind, was_stopped
from flowmill.flows.chained import chained
from flowmill.flows.pipeline import pipeline
from flowmill.flows.requests import PipelineRequest, StageRequest, SweepRequest
from flowmill.flows.scheduled_runs import make_up_for_missed, scheduled
from flowmill.flows.server import environment_of_child
from flowmill.flows.stages import FLOWS
from flowmill.tasks.checks.check import check_config
from flowmill.tasks.execution.launch import stop_trees
from flowmill.tasks.execution.parent_death import die_with_parent
from flowmill.tasks.metrics.sweep import (
    FINAL,
    Outcome,
    Variant,
    best_first,
    check_varied,
    final_settings,
    outcome,
    ranking,
    variants,
    with_final,
)
from flowmill.tasks.runs.opening import bind_run, find_run, with_columns_of_run
from flowmill.tasks.tracking.sweeps import SweepRun

_LOOK_S = 0.5
#: Lines of a failed process that are shown.
_TAIL = 5


@flow(name="sweep", flow_run_name=process_state.flow_run_name, persist_result=False)
def sweep(request: SweepRequest) -> Any:
    """Run every variant, compare them, and return their outcomes, best first, and the report if it could be drawn."""
    with scheduled(request) as result, cancels_parts():
        make_up_for_missed()
        result.value = _sweep(request)
    return result.value


def _sweep(request: SweepRequest) -> tuple[list[Outcome], str | None]:
    listed = variants(request.name, request.grid, request.listed)
    requests = {variant.name: _request_of(request, variant) for variant in listed}
    configs = [_config(each) for each in requests.values()]
    weights = ranking(request.config, request.overrides, configs, final=request.final).weights
    for start in chained(requests[listed[0].name])[:-1]:
        pipeline(start)
    first = bind_run(_config(requests[listed[0].name]))
    tracked = SweepRun(first, request.name, requests, say=process_state.reporter().message)
    with _ended_early(tracked):
        if (parent := tracked.run_id) is not None:
            requests = {name: each.below(parent) for name, each in requests.items()}
        failed = _concurrently(requests, request.parallel) if request.parallel > 1 else _in_turn(requests)
        contexts = {name: bind_run(_config(each)) for name, each in requests.items()}
        outcomes = best_first([outcome(contexts[each.name], each, weights) for each in listed])
        if request.final is not None and outcomes[0].reward is not None:
            outcomes[0] = _evaluated_again(request.final, outcomes[0], requests[outcomes[0].variant.name])
        report = report_of(*(contexts[each.variant.name] for each in outcomes))
        tracked.log(outcomes, report)
        tracked.end("FAILED" if failed else "FINISHED")
    if failed:
        names = "\n  ".join(f"{name}: {error}" for name, error in failed.items())
        raise WorkerError(f"{len(failed)} of {len(listed)} variants failed; the others are done:\n  {names}")
    return outcomes, report


@contextlib.contextmanager
def _ended_early(tracked: SweepRun) -> Iterator[None]:
    """End the MLflow run of a sweep if an error or a signal ends the block."""
    try:
        yield
    except BaseException as error:
        tracked.end("KILLED" if was_stopped(error) else "FAILED")
        raise


def _evaluated_again(prompts: str, best: Outcome, request: PipelineRequest) -> Outcome:
    """Evaluate the best variant on prompts not used for selection, as a side result of its run."""
    config, name = _config(request), best.variant.name
    process_state.reporter().message(f"variant {name}, the best, on {prompts}")
    FLOWS["evaluate"](
        StageRequest(
            run=name,
            root=config.store.root,
            epoch=best.epoch,
            evaluation=FINAL,
            overrides=final_settings(config, prompts),
            wait_minutes=request.wait_minutes,
            gpu_slots=request.gpu_slots,
        )
    )
    return with_final(best, bind_run(config))


def _request_of(request: SweepRequest, variant: Variant) -> PipelineRequest:
    """Return the pipeline request of a variant, after checking its config and the run of its name, if it exists."""
    pipeline_request = PipelineRequest(
        config=request.config,
        root=request.root,
        name=variant.name,
        overrides=[*request.overrides, *variant.overrides],
        wait_minutes=request.wait_minutes,
        gpu_slots=request.gpu_slots,
    )
    check_varied(variant)
    config = _config(pipeline_request)
    check_config(config, rewards=False)
    if request.final is not None:
        check_config(override_config(config, final_settings(config, request.final)), rewards=False)
    find_run(with_columns_of_run(config))
    return pipeline_request


def _config(request: PipelineRequest) -> RunConfig:
    return process_state.configured(request)


def _in_turn(requests: Mapping[str, PipelineRequest]) -> dict[str, str]:
    """Run variants one after the other, and return the errors of those that failed."""
    failed = {}
    for name, request in requests.items():
        check_cancelled()
        process_state.reporter().message(f"variant {name}")
        state: State[Any] = pipeline(request, return_state=True)  # type: ignore[assignment]
        if state.is_cancelled() or state.is_cancelling():
            raise CancelledError(state.message or "cancelled")
        if not state.is_completed():
            error = state.result(raise_on_failure=False)
            stop = signal_behind(error) if isinstance(error, BaseException) else None
            if stop is not None:
                raise stop
            failed[name] = str(error) if isinstance(error, BaseException) else str(state.message)
    return failed


def _concurrently(requests: Mapping[str, PipelineRequest], count: int) -> dict[str, str]:
    """Run variants in separate processes, ``count`` at a time, and return the errors of those that failed."""
    failed, stop = {}, threading.Event()
    runner: ThreadPoolTaskRunner[Any] = ThreadPoolTaskRunner(max_workers=count)
    # The event is set before the runner exits: the runner waits for its started tasks.
    with runner, _set_in_the_end(stop):
        started = {
            name: runner.submit(
                run_variant.with_options(task_run_name=name), {"arguments": ["run", *request.arguments()], "stop": stop}
            )
            for name, request in requests.items()
        }
        for name, future in started.items():
            while not future.state.is_final():
                check_cancelled()
                future.wait(timeout=_LOOK_S)
            if not future.state.is_completed():
                failed[name] = str(future.state.result(raise_on_failure=False))
            process_state.reporter().message(f"variant {name} {'failed' if name in failed else 'is done'}")
    return failed


@contextlib.contextmanager
def _set_in_the_end(event: threading.Event) -> Iterator[None]:
    try:
        yield
    finally:
        event.set()


@task(name="variant", cache_policy=NO_CACHE, persist_result=False)
def run_variant(arguments: Sequence[str], stop: threading.Event) -> None:
    """Run one variant in a separate process, with this process's Prefect server.

    Args:
        arguments: arguments of the ``flowmill`` command.
        stop: set when the sweep is over: the process is then stopped, or not started.
    """
    if stop.is_set():
        raise WorkerError("the sweep was stopped before it")
    process = subprocess.Popen(
        # Files in the working directory must not shadow libraries; the command still finds the modules there.
        [sys.executable, "-P", "-m", "flowmill.flows.cli", *arguments, "--quiet"],
        env=environment_of_child(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        preexec_fn=lambda: die_with_parent(signal.SIGTERM),
    )
    try:
        while process.poll() is None and not stop.is_set():
            _errors(process)
        # It may end between two looks, and its child processes may still hold the pipe.
        if process.returncode and not stop.is_set():
            said = "\n".join(_errors(process).splitlines()[-_TAIL:]).removeprefix("flowmill: ")
            raise WorkerError(said or f"its process ended with code {process.returncode}")
    finally:
        stop_trees([process], grace=10)


def _errors(process: subprocess.Popen[str]) -> str:
    """Return the standard error of a process so far, after its end or a short time."""
    try:
        return process.communicate(timeout=_LOOK_S)[1]
    except subprocess.TimeoutExpired as late:
        return (late.stderr or b"").decode(errors="replace")
