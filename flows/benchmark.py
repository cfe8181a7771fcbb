"""Benchmarks: the stages of an evaluation, with the policies of other runs."""

from __future__ import annotations

from typing import Any

from prefect import flow

from configs.benchmark import Benchmark, load_benchmark
from flows import process_state
from flows.requests import BenchmarkRequest
from flows.scheduled_runs import make_up_for_missed, scheduled, turn
from flows.stages import RunStages
from storage.layout import ArtifactRef
from tasks.checks.try_rewards import try_rewards
from tasks.reports.benchmark import Subject, find_subject, pinned_run, result_of
from tasks.reports.benchmark_results import Result
from tasks.runs.locks import executing
from tasks.specs.graph import OF


@flow(name="benchmark", flow_run_name=process_state.flow_run_name, persist_result=False)
def benchmark(request: BenchmarkRequest) -> Any:
    """Measure models, one after the other; committed artifacts are reused."""
    with scheduled(request) as result:
        make_up_for_missed()
        pinned = load_benchmark(request.name, prompts=request.prompts)
        subjects = [
            find_subject(model, root=request.root, config=request.config, trusted=request.trust_store)
            for model in request.models
        ]
        result.value = [_measured(pinned, subject, request) for subject in subjects]
    return result.value


def _measured(pinned: Benchmark, subject: Subject, request: BenchmarkRequest) -> Result:
    shown = process_state.reporter()
    context = pinned_run(pinned, subject, root=request.root, processes=request.processes, reporter=shown)
    with turn(context, request), executing(context), process_state.opened(context) as execution:
        stages = RunStages(execution)
        for node in context.plan.setup():
            stages.run(node.stage, node.epoch, node.slot)
        policy = subject.policy or context.policy_ref(0)

        def completed(name: str, slot: str, *inputs: ArtifactRef) -> ArtifactRef:
            stage = stages.stage(name, 0, slot)
            stage.adopt(stage.work(inputs), inputs)
            if name == "evaluate" and context.store.manifest(stage.ref) is None:
                # Report a missing requirement of a reward before sampling.
                try_rewards(context.config, made=execution.host.rewards)
            return stages.run(name, 0, slot, stage=stage)

        named = str(policy).replace("/", ".")
        images = completed("evaluate", named, policy, context.chain.require(0, "preprocess").ref)
        slots = [section.slot for section in context.config.rewards]
        scored = {slot: completed("judge", f"{slot}{OF}{named}", images) for slot in slots}
    return result_of(pinned, subject, context, images=images, policy=policy, scored=scored)
