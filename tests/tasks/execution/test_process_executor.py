"""Executors name what they committed; processes that score give the scores of one thread, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from flowmill.configs.errors import RewardError, WorkerError
from flowmill.configs.schema import RunConfig
from flowmill.flows import process_state, stages
from flowmill.tasks.execution import process_executor
from flowmill.tasks.execution.executor import Executor, Listener
from flowmill.tasks.execution.process_executor import ProcessExecutor
from flowmill.tasks.execution.rank_executor import RankExecutor
from flowmill.tasks.execution.runners import score_workers
from flowmill.tasks.execution.session import Session
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.specs.graph import Node
from flowmill.tasks.stages.stage import Shard
from flowmill.tasks.stages.stage_run import StageRun
from tests.support.inside import Make, make_stage, prepare, run_stage, session_of, stage_run

ONE = "rollout.groups_per_shard=1"


@pytest.fixture
def worth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every reward is worth a process."""
    monkeypatch.setattr(process_executor, "_WORTH_S", 0.0)
    monkeypatch.setattr(process_executor, "_SLOW_S", 0.0)


def rolled_out(config: RunConfig) -> RunContext:
    context = prepare(config)
    run_stage(context, "rollout", 1)
    return context


def scored(context: RunContext, made: ProcessExecutor) -> list[int]:
    """Score an epoch by processes; return which were at work."""
    run = stage_run(context, "score", 1, context.config.rewards[0].slot)
    shards: list[str] = []
    assert sorted(made.run(run, run.pending(), Listener(on_commit=shards.extend))) == sorted(shards)
    run.finish()
    assert sorted(shards) == [shard.name for shard in run.stage.shards()]
    return sorted({int(record.producer["pid"]) for record in context.store.records(run.ref)})


@pytest.mark.slow
@pytest.mark.usefixtures("worth")
def test_processes_give_the_scores_of_one_thread(make_config: Make, tmp_path: Path) -> None:
    one = rolled_out(make_config(ONE))
    run_stage(one, "score", 1, "jpeg_compressibility")
    two = rolled_out(make_config(ONE, f"store.root={tmp_path / 'two'}", "execution.score_workers=2"))
    made = ProcessExecutor(session_of(two))
    try:
        pids = scored(two, made)
        assert os.getpid() not in pids
        assert one.chain.digest() == two.chain.digest()
        assert two.ledger.seconds("score") > 0, "what processes do counts as work"
    finally:
        made.close()
    assert not any(map(psutil.pid_exists, pids))


@pytest.mark.campaign
@pytest.mark.slow
@pytest.mark.usefixtures("worth")
def test_a_failing_reward_is_named_and_a_killed_process_replaced(make_config: Make, tmp_path: Path) -> None:
    name = "tests.tasks.execution.test_process_executor:failing"
    reward = f'rewards=[{{name: "{name}", options: {{folder: "{tmp_path}"}}}}]'
    context = rolled_out(make_config(ONE, reward, "execution.score_workers=2"))
    made = ProcessExecutor(session_of(context))
    try:
        with pytest.raises(RewardError, match=r"failed for .*sample .*: ValueError: the sky is green"):
            scored(context, made)
        (tmp_path / "calm").touch()
        (tmp_path / "kill").touch()
        scored(context, made)
        assert not (tmp_path / "kill").exists(), "one was killed, and its shard scored by another"
    finally:
        made.close()


@pytest.mark.campaign
@pytest.mark.slow
@pytest.mark.usefixtures("worth")
def test_closing_ends_what_is_scored_and_starts_nothing_more(make_config: Make, tmp_path: Path) -> None:
    name = "tests.tasks.execution.test_process_executor:sleeping"
    reward = f'rewards=[{{name: "{name}", options: {{folder: "{tmp_path}"}}}}]'
    context = rolled_out(make_config(ONE, reward, "execution.score_workers=2"))
    made = ProcessExecutor(session_of(context))
    closing = threading.Thread(target=lambda: (wait_for(tmp_path / "asleep"), made.close()), daemon=True)
    closing.start()
    with pytest.raises(WorkerError, match="were ended with the run"):
        scored(context, made)
    closing.join(30)
    assert not psutil.pid_exists(int((tmp_path / "asleep").read_text()))


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.05)


def sleeping(media: object, prompts: list[str], metadata: object, *, folder: str) -> list[float]:
    """Say who sleeps, and sleep."""
    (Path(folder) / f"of{os.getpid()}").write_text(str(os.getpid()))
    (Path(folder) / f"of{os.getpid()}").rename(Path(folder) / "asleep")
    time.sleep(600)
    return [0.0] * len(prompts)


def failing(media: object, prompts: list[str], metadata: object, *, folder: str) -> list[float]:
    """Return a score each, fail, or end the process, as files say."""
    try:
        (Path(folder) / "kill").unlink()
    except FileNotFoundError:
        pass
    else:
        os.kill(os.getpid(), signal.SIGKILL)
    if not (Path(folder) / "calm").exists():
        raise ValueError("the sky is green")
    return [0.5] * len(prompts)


@pytest.mark.campaign
@pytest.mark.slow
def test_processes_end_when_their_parent_is_killed() -> None:
    program = (
        "import time, os; from joblib.externals.loky import ProcessPoolExecutor\n"
        "from flowmill.tasks.execution import process_executor as scorers\n"
        "pool = ProcessPoolExecutor(2, initializer=scorers._begin, initargs=(os.getpid(),))\n"
        "print(pool.submit(os.getpid).result(), flush=True); pool.submit(time.sleep, 600); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        assert child.ppid() == parent.pid
        family = psutil.Process(parent.pid).children(recursive=True)
        parent.kill()
        _, alive = psutil.wait_procs(family, timeout=10)
        assert alive == []


def test_cheap_rewards_start_no_process(make_config: Make) -> None:
    context = rolled_out(make_config(ONE, "execution.score_workers=2"))
    run, made = (stage_run(context, "score", 1, "jpeg_compressibility"), ProcessExecutor(session_of(context)))
    assert made.count == 2
    assert made.run(run, run.pending()) == [shard.name for shard in run.stage.shards()]
    assert not made.takes(run.stage)
    assert {record.producer["pid"] for record in context.store.records(run.ref)} == {os.getpid()}
    assert made._pool is None


@pytest.mark.usefixtures("worth")
@pytest.mark.parametrize(
    ("change", "taken"),
    [
        ("execution.score_workers=2", True),
        ("execution.score_workers=1", False),
        ("rewards=[{name: jpeg_compressibility, server: 'http://127.0.0.1:1'}]", False),
        ("rewards=[{name: clip_score}]", False),
    ],
)
def test_who_is_scored_by_processes(make_config: Make, change: str, taken: bool) -> None:
    config = make_config("execution.score_workers=2", change)
    context = prepare(config)
    with context.ledger.work("score"):
        pass
    assert ProcessExecutor(session_of(context)).takes(make_stage(context, "score", 1, config.rewards[0].slot)) is taken


def test_as_many_as_cores_are_left(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    execution = make_config("execution.processes=4").execution
    assert score_workers(execution) == 12
    assert score_workers(execution, on_rank=True) == 4
    assert score_workers(make_config("execution.processes=32").execution) == 1
    assert score_workers(make_config("execution.score_workers=3").execution) == 3


def test_one_thread_at_a_time_uses_a_reward_here(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    context = rolled_out(make_config("execution.score_workers=2"))
    made, at_work = ProcessExecutor(session_of(context)), list[str]()
    run = stage_run(context, "score", 1, "jpeg_compressibility")

    def slowly(shards: Iterator[Shard], *, on_commit: object) -> list[str]:
        at_work.append("in")
        time.sleep(0.02)
        at_work.append("out")
        return []

    monkeypatch.setattr(run, "run_shards", slowly)
    threads = [threading.Thread(target=made.run, args=(run, [])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert at_work == ["in", "out"] * 4


EXECUTORS: dict[str, Callable[[Session], Executor]] = {
    "processes": ProcessExecutor,
    "tasks": stages.TaskExecutor,
    "ranks": RankExecutor,
}


@pytest.mark.parametrize("name", ["processes", "tasks", pytest.param("ranks", marks=pytest.mark.slow)])
def test_an_executor_names_the_shards_that_it_committed(
    name: str, make_config: Make, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if name == "ranks":
        request.getfixturevalue("forked_ranks")
    # Without a Prefect server the function of a task is called.
    monkeypatch.setattr(stages, "shards_task", lambda run, shards: stages.run_shards.fn)
    with closing(session_of(prepare(make_config("rollout.groups_per_shard=1")))) as session:
        run = StageRun(session.stage(Node(1, "rollout")))
        executor, heard = session.executor(EXECUTORS[name]), list[str]()
        assert session.executor(EXECUTORS[name]) is executor
        with process_state.opened(session.context):
            names = executor.run(run, run.pending(), Listener(on_commit=heard.extend))
        assert sorted(names) == sorted(heard) == [shard.name for shard in run.stage.shards()]
        assert run.pending() == []


def test_a_closed_session_makes_its_executors_again(make_config: Make) -> None:
    session = session_of(prepare(make_config()))
    first = session.executor(ProcessExecutor)
    session.close()
    assert session.executor(ProcessExecutor) is not first
