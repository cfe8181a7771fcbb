"""Who takes shards: threads, Dask and Ray make the same artifacts; which policy rolls out ahead is fixed."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import astuple, replace
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import dask
import psutil
import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from flowmill.configs import extras
from flowmill.configs.errors import ConfigError, RunConflictError, WorkerError
from flowmill.configs.schema import StoreSection
from flowmill.flows import process_state, stages
from flowmill.flows.run_in_process import _LOGGERS, on_server
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.layout import ArtifactRef
from flowmill.tasks.checks.check import check_config
from flowmill.tasks.execution.executor import Listener
from flowmill.tasks.execution.jobs import JobSession, JobSpec
from flowmill.tasks.execution.session import Session
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runs.opening import begin_run, open_run
from flowmill.tasks.runs.progress import Silent
from flowmill.tasks.specs.graph import Node
from flowmill.tasks.specs.plan import RunPlan
from flowmill.tasks.stages.stage_run import StageRun
from tests.conftest import ROOT, FlowmillCommand
from tests.support import clusters
from tests.support.clusters import Started, running
from tests.support.inside import Make, make_stage, prepare, run_epoch, stage_run, stored_shards, updates_of
from tests.support.s3 import Server, free_port, make_bucket, use


@pytest.fixture
def bucket(s3_server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    use(monkeypatch, {**s3_server.variables(), "XDG_CACHE_HOME": str(tmp_path / "xdg")})
    return make_bucket()


def test_a_runner_whose_package_is_missing_says_what_to_install(
    make_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'flowmill\[ray\]'"):
        check_config(make_config("execution.runner={name: ray, options: {address: '127.0.0.1:6379'}}"))


def test_a_runner_whose_package_is_older_says_what_to_install(
    make_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = make_config("execution.runner={name: dask}")
    check_config(chosen)
    monkeypatch.setattr(extras, "version", lambda package: "0.3.6")
    with pytest.raises(
        ConfigError,
        match=r"'dask' needs prefect-dask 0\.3\.7 or later, and 0\.3\.6 .*pip install --upgrade 'flowmill\[dask\]'",
    ):
        check_config(chosen)


def test_which_policy_rolls_out_which_epoch_is_fixed(make_config: Make) -> None:
    config = make_config("execution.ahead=2", "run.epochs=4")
    assert [RunPlan(config).policy_of(epoch) for epoch in (1, 2, 3, 4)] == [
        Node(0, "policy"),
        Node(0, "policy"),
        Node(0, "policy"),
        Node(1, "optimize"),
    ]
    assert [list(RunPlan(config).rollouts_from(epoch)) for epoch in (1, 2, 3, 4)] == [[1, 2, 3], [2, 3, 4], [3, 4], [4]]


def test_ahead_belongs_to_what_a_run_is(make_config: Make) -> None:
    begin_run(make_config())
    with pytest.raises(RunConflictError, match=r"execution.ahead: 0 -> 1"):
        begin_run(make_config("execution.ahead=1"))
    begin_run(make_config("execution.retries=7"))


def test_rows_of_an_older_policy_are_corrected(make_config: Make) -> None:
    """The ratio of the first update is to the policy the epoch starts from; the importance is what is off-policy."""
    context = prepare(make_config("execution.ahead=1", "run.epochs=3", "optimize.learning_rate=1e-2"))
    for epoch in (1, 2, 3):
        run_epoch(context, epoch)
    assert rolled_out_with(context, 2) == str(context.chain.ref(Node(0, "policy")))
    assert rolled_out_with(context, 3) == str(context.policy_ref(1))
    first = {epoch: updates_of(context, epoch)[0] for epoch in (1, 2, 3)}
    assert "importance" not in first[1]
    for epoch in (2, 3):
        assert first[epoch]["ratio_mean"] == 1.0
        assert first[epoch]["importance"] != 1.0
        assert "clip_age1" in first[epoch]


def test_algorithms_on_final_latents_train_on_rows_of_an_older_policy(make_config: Make) -> None:
    options = ["rollout.plan={name: final}", "rollout.sampler={name: ode}", "execution.ahead=1"]
    context = prepare(make_config("optimize.algorithm=awm", *options))
    for epoch in (1, 2):
        run_epoch(context, epoch)
    assert context.policy_ref(2) != context.policy_ref(1)


def rolled_out_with(context: RunContext, epoch: int) -> str:
    """The policy that every sample of an epoch says it is of, which is the one the artifact was made from."""
    shards = stored_shards(context, epoch, "rollout")
    named = {name for shard in shards for name in shard.table.column("policy").to_pylist()}
    assert named == {context.store.require(context.chain.require(epoch, "rollout").ref).inputs[0]}
    return str(ArtifactRef.parse(named.pop()))


def test_a_worker_of_another_version_refuses_the_work(make_config: Make) -> None:
    context = prepare(make_config())
    order = JobSpec.of(stage_run(context, "rollout", 1))
    with process_state.session_of(order) as visited:
        assert visited.context.run.name == "small"
    with (
        pytest.raises(WorkerError, match="runs another version of flowmill than run 'small'"),
        process_state.session_of(replace(order, code="other")),
    ):
        pass
    for fields in ({"further": 1}, {"identities": None}):
        of_other_version = {**json.loads(order.encoded()), **fields}
        written = json.dumps({name: value for name, value in of_other_version.items() if value is not None})
        with pytest.raises(WorkerError, match="runs another version of flowmill than run 'small'"):
            JobSpec.parse(written)


def test_concurrent_calls_work_with_their_own_settings(make_config: Make) -> None:
    run, both, levels = begin_run(make_config()), Barrier(2), [logging.getLogger(name).level for name in _LOGGERS]
    api: Any = SimpleNamespace(wait=lambda: "http://127.0.0.1:1/api")

    def work(overrides: Sequence[str]) -> None:
        context, shown = open_run(run.store.root.uri, "small", overrides=overrides), Silent()
        with on_server(api), process_state.shown_by(shown), process_state.opened(context) as session:
            both.wait(20)
            job = JobSpec.of(StageRun(session.stage(Node(0, "base"))))
            with process_state.session_of(job) as own:
                assert own is session
            # As Prefect's threads of tasks do.
            with ThreadPoolExecutor(1) as task:
                assert task.submit(copy_context().run, process_state._open.get).result() is session
            with process_state.session_of(replace(job, epoch=9)) as other:
                assert (other.context.epoch, other is session) == (9, False)
            both.wait(20)
        # The first to begin ends first.
        assert (process_state._open.get(), process_state.is_called()) == (None, False)

    with ThreadPoolExecutor(2) as threads:
        [*threads.map(work, (["run.seed=1"], ["run.seed=2"]))]
    assert [logging.getLogger(name).level for name in _LOGGERS] == levels


def test_a_run_is_begun_with_the_config_named(make_config: Make) -> None:
    first = begin_run(make_config())
    with process_state.opened(first):
        assert process_state.begin(make_config()) is first
        assert process_state.begin(make_config("run.epochs=7")).config.run.epochs == 7


def test_a_context_that_cannot_be_opened_is_not_taken_for_the_one_before(make_config: Make, tmp_path: Path) -> None:
    first, second = (prepare(make_config(f"store.root={tmp_path / name}")) for name in ("a", "b"))
    orders = [JobSpec.of(stage_run(context, "rollout", 1)) for context in (first, second)]
    failing = [True]

    def opened(session: Session) -> None:
        if session.context.store.root.uri == orders[1].root and failing.pop():
            raise OSError("the store cannot be reached")

    kept = JobSession(Silent, opened)
    assert kept.of(orders[0]).context.store.root.uri == orders[0].root
    with pytest.raises(OSError, match="cannot be reached"):
        kept.of(orders[1])
    failing.append(False)
    assert kept.of(orders[1]).context.store.root.uri == orders[1].root


AHEAD = ("--set", "execution.ahead=1", "--set", "run.epochs=3", "--quiet")


def digest(root: str) -> str:
    return open_run(root, "small", reads=True).chain.digest()


def by_threads(flowmill: FlowmillCommand, config: Path, root: Path) -> str:
    said = flowmill("run", str(config), "--root", str(root), *AHEAD)
    assert said.returncode == 0, said.stderr
    return digest(str(root))


@pytest.fixture
def ray_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A Ray cluster of two workers on this machine, which wants a token."""
    with clusters.ray_cluster(os.environ) as (address, token, _):
        use(monkeypatch, token)
        yield address


@pytest.mark.campaign
def test_ray_workers_make_the_same_artifacts_as_threads(
    ray_cluster: str, flowmill: FlowmillCommand, config_file: Path, tmp_path: Path
) -> None:
    root, chosen = str(tmp_path / "ray"), f"execution.runner={{name: ray, options: {{address: '{ray_cluster}'}}}}"
    said = flowmill("run", str(config_file), "--root", root, "--set", chosen, *AHEAD)
    assert said.returncode == 0, said.stderr
    assert digest(root) == by_threads(flowmill, config_file, tmp_path / "threads")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "scheme", "cause", "remedy"),
    [
        ("dask", "tcp://", "OSError: Timed out trying to connect to", "'dask scheduler --port 8786' starts one"),
        pytest.param(
            *("ray", "", "ConnectionError: Failed to connect to", "'ray start --head --port=6379' starts one"),
            marks=pytest.mark.campaign,
        ),
    ],
)
def test_a_cluster_that_is_not_there_is_named(
    name: str, scheme: str, cause: str, remedy: str, flowmill: FlowmillCommand, config_file: Path, tmp_path: Path
) -> None:
    address = f"{scheme}127.0.0.1:{free_port()}"
    chosen = f"execution.runner={{name: {name}, options: {{address: '{address}'}}}}"
    patience = {"DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "2s"}
    began = time.monotonic()
    said = flowmill("run", str(config_file), "--root", str(tmp_path / "x"), "--set", chosen, "--quiet", **patience)
    assert said.returncode == 1
    assert f"execution.runner '{name}' cannot be started. {cause}" in said.stderr
    assert remedy in said.stderr
    assert "Traceback" not in said.stderr
    assert time.monotonic() - began < 240


@pytest.mark.campaign
def test_dask_workers_on_one_bucket_make_the_same_artifacts_though_one_is_killed(
    bucket: str, flowmill: FlowmillCommand, config_file: Path, tmp_path: Path, prefect_server: str
) -> None:
    root, tracking = f"s3://{bucket}/dask", f"tracking.uri=sqlite:///{tmp_path / 'mlflow.db'}"
    command = [sys.executable, "-m", "flowmill.flows.cli", "run", str(config_file), "--root", root, *AHEAD]
    command += ["--set", "execution.runner={name: dask}", "--set", tracking]
    environment = {**os.environ, "PREFECT_API_URL": prefect_server}
    store = ArtifactStore(StoreSection(root=root, cache=str(tmp_path / "cache")))
    with subprocess.Popen(command, cwd=ROOT, env=environment, text=True, stderr=subprocess.PIPE) as run:
        killed = kill_a_worker(run, lambda: bool(store.root.list("trajectories")))
        said = run.communicate(timeout=240)[1]
    assert run.returncode == 0, said
    assert killed
    assert digest(root) == by_threads(flowmill, config_file, tmp_path / "threads")


def kill_a_worker(run: subprocess.Popen[str], when: Callable[[], bool]) -> bool:
    """Kill one of a run's Dask workers as soon as something is true."""
    deadline = time.monotonic() + 240
    while run.poll() is None and time.monotonic() < deadline:
        if when():
            for child in psutil.Process(run.pid).children(recursive=True):
                if any("spawn_main" in word for word in child.cmdline()):
                    child.kill()
                    return True
        time.sleep(0.2)
    return False


def test_short_shards_share_a_task_and_long_ones_do_not(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    context = prepare(make_config("rollout.groups_per_shard=1"))
    stage = make_stage(context, "rollout", 1)
    run = StageRun(stage)
    due = run.pending()
    assert len(due) > 2
    committed: list[list[str]] = []
    monkeypatch.setattr(stages, "shards_task", lambda run, shards: stages.run_shards.fn)
    monkeypatch.setattr(stages, "_TASK_S", 600.0)
    with process_state.opened(context) as session:
        # No time at all: a task of its own for each.
        assert stages.run_shards.fn(stages.job_of(run), [astuple(shard) for shard in due[:2]], 0.0) == [due[0].name]
        assert [shard.name for shard in run.pending()] == [shard.name for shard in due[1:]]
        listener = Listener(on_commit=lambda names: committed.append([*names]))
        names = session.executor(stages.TaskExecutor).run(run, run.pending(), listener)
    assert committed == [names] == [[shard.name for shard in due[1:]]]
    assert run.pending() == []


@pytest.fixture
def dask_scheduler() -> Iterator[tuple[str, Started]]:
    """A Dask scheduler without workers, and its process."""
    address, scheduler = clusters.dask_scheduler(os.environ)
    with running(scheduler):
        yield address, scheduler


@pytest.mark.slow
def test_a_wait_ends_with_the_scheduler_and_without_workers(
    make_config: Make,
    dask_scheduler: tuple[str, Started],
    prefect_server: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address, scheduler = dask_scheduler
    for patience in ("_PATIENCE_S", "_WORKER_S"):
        monkeypatch.setattr(f"flowmill.tasks.execution.runners.{patience}", 1.0)
    context = begin_run(make_config(f"execution.runner={{name: dask, options: {{address: '{address}'}}}}"))
    chosen = dask.config.set({"distributed.comm.timeouts.connect": "3s"})
    with chosen, temporary_settings({PREFECT_API_URL: prefect_server}), process_state.opened(context) as session:
        tasks, run = session.executor(stages.TaskExecutor), stage_run(context, "base", 0)
        (shard,) = run.pending()

        def ended(fault: str) -> None:
            with pytest.raises(
                WorkerError, match=rf"shard model of base@0 was done: ({fault}).*same command continues"
            ):
                tasks.wait(run, {shard.name: tasks.submit(run, [shard])})

        future, idle = tasks.submit(run, [shard]), f"no worker is connected to the scheduler {address}"
        # With the first task the scheduler imports libraries, and may answer late.
        while (fault := tasks._runner.fault(tasks._started)[0]) != idle:
            assert "does not answer" in fault
        ended(idle)
        scheduler.kill()
        with pytest.raises(WorkerError, match=r"ended before it was done: FutureCancelledError: .*scheduler"):
            tasks.wait_for(future, "it")
        ended("the connection to the scheduler is connecting|ClosedClientError|FutureCancelledError")


@pytest.mark.campaign
def test_a_run_outlives_its_ray_cluster(
    ray_cluster: str, flowmill: FlowmillCommand, config_file: Path, tmp_path: Path
) -> None:
    root, chosen = str(tmp_path / "ray"), f"execution.runner={{name: ray, options: {{address: '{ray_cluster}'}}}}"
    command = [sys.executable, "-m", "flowmill.flows.cli", "run", str(config_file), "--root", root, *AHEAD]
    with subprocess.Popen([*command, "--set", chosen], cwd=ROOT, text=True, stderr=subprocess.PIPE) as run:
        deadline = time.monotonic() + 240
        while run.poll() is None and time.monotonic() < deadline and not (Path(root) / "trajectories").exists():
            time.sleep(0.2)
        for process in psutil.process_iter(["cmdline"]):
            if f"--gcs_server_port={ray_cluster.rpartition(':')[2]}" in (process.info["cmdline"] or ()):
                process.kill()
        said = run.communicate(timeout=120)[1]
    assert run.returncode == 1, said
    assert f"its head {ray_cluster} does not answer" in said
    assert "Traceback" not in said
    assert flowmill("run", str(config_file), "--root", root, *AHEAD).returncode == 0
    assert digest(root) == by_threads(flowmill, config_file, tmp_path / "threads")


class Sent:
    """The future of a task on a cluster: what its looks give, and what the server knows of the task."""

    def __init__(self, *looks: BaseException | None, ended: bool, arrived: bool = False) -> None:
        self._looks, self.state = [*looks], SimpleNamespace(is_final=lambda: ended)
        self._final_state = self.state if arrived else None

    def result(self, timeout: float) -> None:
        look = self._looks.pop(0) if len(self._looks) > 1 else self._looks[0]
        if look is not None:
            raise look


def test_a_lost_result_is_no_error_of_the_task(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from distributed.client import FutureCancelledError

    runner = "execution.runner={name: dask, options: {address: 'tcp://127.0.0.1:8786'}}"
    tasks = stages.TaskExecutor(Session(begin_run(make_config(runner))))
    tasks._started = SimpleNamespace(client=SimpleNamespace(status="closed"))
    looks: list[str] = []
    listener = Listener(on_look=lambda: looks.append("look"))
    # The task ends between the look and the question for its state.
    for ended in (False, True):
        tasks.wait_for(Sent(TimeoutError(), TimeoutError(), None, ended=ended), "shard 0", listener)
    assert looks == ["look"] * 6
    # A look of Dask without a result or an error says nothing of the task.
    monkeypatch.setattr(stages, "_LOOK_S", 0.01)
    tasks.wait_for(Sent(UnboundLocalError(), TimeoutError(), None, ended=False), "shard 0", listener)
    lost = [FutureCancelledError("task", "scheduler-connection-lost"), RuntimeError("the client is closed")]
    for error, ended in zip(lost * 2, (False, False, True, True), strict=True):
        with pytest.raises(WorkerError, match=f"runner 'dask' ended before shard 0 was done: {type(error).__name__}"):
            tasks.wait_for(Sent(TimeoutError(), error, ended=ended), "shard 0", listener)
    for own in (TimeoutError("of the task"), ValueError("of the task")):
        with pytest.raises(type(own), match="of the task"):
            tasks.wait_for(Sent(own, ended=True, arrived=True), "shard 0", listener)
    monkeypatch.setattr(stages, "_FINAL_S", 0.1)
    monkeypatch.setattr("flowmill.tasks.execution.runners._PATIENCE_S", 0.1)
    for ended, fault in ((True, "its result does not come"), (False, "the connection to the scheduler is closed")):
        with pytest.raises(WorkerError, match=fault):
            tasks.wait_for(Sent(TimeoutError(), ended=ended), "shard 0", listener)
