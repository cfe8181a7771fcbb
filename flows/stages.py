"""Each stage wrapped once for Prefect: a task per shard, and a flow per stage."""

from __future__ import annotations

import errno
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from prefect import Flow, flow, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.futures import PrefectFuture
from prefect.tasks import Task, exponential_backoff

from configs.errors import FlowmillError, StoreError
from configs.load import override_config
from flows import runtime
from flows.cancellation import check_cancelled
from storage.layout import ArtifactRef
from tasks.chain import Node
from tasks.describe import describe_artifact
from tasks.launch import run_torchrun
from tasks.plans import named_stages
from tasks.runs import open_run, refuse_while_executing
from tasks.stage import Shard, Stage, StageRun
from tasks.stages import DECODING, STAGES
from tasks.tracking.tracker import log_side_evaluations
from tasks.worker import PREFIX

_TRANSIENT = {
    errno.EAGAIN,
    errno.EBUSY,
    errno.EIO,
    errno.ECONNABORTED,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
    errno.EPIPE,
    errno.EREMOTEIO,
    errno.ESTALE,
    errno.ETIMEDOUT,
}


def is_transient(task: Task[..., Any], task_run: TaskRun, state: State[Any]) -> bool:
    """Return whether a failed shard is worth another try: connections and I/O, never a wrong config or a bug."""
    error = state.result(raise_on_failure=False)
    if isinstance(error, FlowmillError) or not isinstance(error, OSError):
        return False
    return isinstance(error, ConnectionError | TimeoutError) or error.errno in _TRANSIENT


@task(name="shard", cache_policy=NO_CACHE, persist_result=False, retry_condition_fn=is_transient)
def run_shard(
    root: str, run: str, stage: str, epoch: int, slot: str, artifact: str, shard: tuple[str, int, int]
) -> str:
    """Run and commit one shard; our manifests decide what is skipped, so Prefect caches nothing."""
    found = runtime.find_stage(root, run, stage, epoch, slot)
    found.adopt(ArtifactRef.parse(artifact))
    return StageRun(found).run_shard(Shard(*shard)).digest


def execute(stage: Stage, *, force: bool = False) -> ArtifactRef:
    """Run what is left of a stage, here or under torchrun, and complete its artifact."""
    run = StageRun(stage, force=force)
    runtime.keep_stage(stage)
    if not run.complete:
        work(run, on_commit=lambda shard: None)
    run.finish()
    return run.ref


def work(run: StageRun, *, on_commit: Callable[[str], None]) -> None:
    """Run all pending shards of a stage; ``on_commit`` hears the name of each as soon as it is committed."""
    if run.stage.spreads and run.stage.config.execution.processes > 1:
        _work_spread(run, on_commit)
        return
    for shard in run.pending():
        check_cancelled()
        shard_task(run, shard)(*shard_arguments(run, shard))
        on_commit(shard.name)


def submit(run: StageRun, shard: Shard) -> PrefectFuture[str]:
    """Start one shard on the flow's task runner and return its future."""
    return shard_task(run, shard).submit(*shard_arguments(run, shard))  # type: ignore[return-value]


def shard_task(run: StageRun, shard: Shard) -> Task[..., str]:
    """Return the shard task with the run's retry settings and a readable name."""
    execution = run.stage.config.execution
    slot = f" {run.stage.slot}" if run.stage.slot else ""
    return run_shard.with_options(
        retries=execution.retries,
        retry_delay_seconds=exponential_backoff(execution.retry_delay_s),
        task_run_name=f"{run.stage.name}{slot} e{run.stage.epoch} {shard.name}",
    )


def shard_arguments(run: StageRun, shard: Shard) -> tuple[Any, ...]:
    """Return what identifies a shard's work in any process."""
    stage, uri = run.stage, run.store.root.uri
    key = (uri, stage.workspace.run.name, stage.name, stage.epoch, stage.slot)
    return (*key, str(run.ref), (shard.name, shard.start, shard.stop))


@task(name="torchrun", cache_policy=NO_CACHE, persist_result=False)
def run_ranks(arguments: Sequence[str], processes: int, on_line: Callable[[str], None]) -> None:
    """Run one stage in several processes."""
    run_torchrun("tasks.worker", arguments, processes=processes, on_line=on_line)


def _work_spread(run: StageRun, on_commit: Callable[[str], None]) -> None:
    stage = run.stage
    config = override_config(stage.config, [f"store.root={run.store.root.uri}"])
    check_cancelled()
    with tempfile.TemporaryDirectory(prefix="flowmill-") as folder, stage.workspace.ledger.work(stage.name):
        path = Path(folder) / "config.json"
        path.write_text(config.model_dump_json())
        name = f"{stage.name} e{stage.epoch} x{config.execution.processes}"
        run_ranks.with_options(task_run_name=name)(
            [str(path), stage.name, str(stage.epoch), stage.slot, str(run.ref)],
            config.execution.processes,
            _listener(stage, on_commit),
        )


def _listener(stage: Stage, on_commit: Callable[[str], None]) -> Callable[[str], None]:
    """Return what turns the ranks' lines into progress, commits and messages."""

    def listen(line: str) -> None:
        check_cancelled()
        if not line.startswith(PREFIX):
            if line.strip():
                stage.workspace.reporter.message(f"[{stage.name}] {line}")
            return
        data = json.loads(line.removeprefix(PREFIX))
        if "progress" in data:
            stage.workspace.reporter.progress(*data["progress"])
        elif "committed" in data:
            on_commit(data["committed"])
        else:
            stage.workspace.reporter.message(data["message"])

    return listen


def stage_flow(name: str) -> Flow[..., list[str]]:
    """Return the flow that runs one stage of an existing run.

    Raises:
        StoreError: there is no such stage.
    """
    if name not in STAGES:
        raise StoreError(f"There is no stage '{name}'; stages are {', '.join(STAGES)}.")

    @flow(name=name, flow_run_name=f"{{run}} {name} e{{epoch}}", persist_result=False, validate_parameters=False)
    def stage_of_run(
        run: str,
        root: str = "flowmill-store",
        epoch: int = 0,
        slot: str = "",
        force: bool = False,
        overrides: Sequence[str] = (),
        evaluation: str = "",
    ) -> list[str]:
        workspace = open_run(root, run, overrides=overrides, reporter=runtime.reporter(), epoch=epoch)
        workspace.decodes = name in DECODING
        workspace = runtime.remember(workspace)
        refuse_while_executing(workspace)
        nodes = named_stages(workspace, Node(epoch, name, slot), evaluation=evaluation)
        made = {node: execute(workspace.chain.stage(node), force=force and node.stage == name) for node in nodes}
        log_side_evaluations(workspace)
        runtime.forget(workspace)
        return [describe_artifact(workspace, node, ref) for node, ref in made.items()]

    return stage_of_run


base = stage_flow("base")
encode = stage_flow("encode")
preprocess = stage_flow("preprocess")
policy = stage_flow("policy")
rollout = stage_flow("rollout")
score = stage_flow("score")
advantage = stage_flow("advantage")
optimize = stage_flow("optimize")
evaluate = stage_flow("evaluate")
judge = stage_flow("judge")
export = stage_flow("export")
FLOWS = {
    flow.name: flow
    for flow in (base, encode, preprocess, policy, rollout, score, advantage, optimize, evaluate, judge, export)
}
