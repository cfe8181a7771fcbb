"""torchrun for real: errors with the right rank, no orphans, and the same results as one process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from torch.distributed import HashStore

from flowmill.configs.errors import LostRankError, WorkerError
from flowmill.storage.trajectories.tables import read_rows
from flowmill.tasks.execution.executor import Listener
from flowmill.tasks.execution.launch import Launched
from flowmill.tasks.execution.launchers import Agents, Local, Program
from flowmill.tasks.execution.process_executor import ProcessExecutor
from flowmill.tasks.execution.rank_executor import RankExecutor
from flowmill.tasks.execution.worker import run_share
from flowmill.tasks.inputs.weight_sources import OPTIMIZER, Weights
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runs.opening import begin_run, open_run
from flowmill.tasks.runtime.heartbeat import Heartbeat, HeartbeatSender, Watch
from flowmill.tasks.runtime.kv_store import KeyValueStore
from flowmill.tasks.runtime.ranks import Ranks
from flowmill.tasks.stages.stage import Shard
from flowmill.tasks.stages.stage_run import StageRun
from tests.support.inside import Make, make_stage, prepare, run_epoch, session_of, stage_run
from tests.tasks.stages.test_stages import assert_same_trajectories, base_weights, stored, trajectories, weights

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Writes a worker module and returns its name."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")

    def write(body: str) -> str:
        imports = "import os, sys, time\nfrom torch.distributed.elastic.multiprocessing.errors import record\n"
        lines = f"{imports}\n@record\ndef main():\n"
        (tmp_path / "worker_under_test.py").write_text(
            lines + textwrap.indent(textwrap.dedent(body), "    ") + "\nmain()\n"
        )
        return "worker_under_test"

    return write


def start(name: str, *arguments: str) -> Launched:
    """Start a module in two processes."""
    return Launched(Program(module=name, arguments=arguments, processes=2), Local())


def printed(name: str, arguments: list[str]) -> list[str]:
    """Run a module in two processes to its end; return what it printed."""
    launched = start(name, *arguments)
    try:
        return [line for line in launched.lines(1) if line is not None]
    finally:
        launched.stop()


@pytest.mark.campaign
def test_lines_come_through(module: Callable[[str], str]) -> None:
    lines = printed(
        module("sys.stdout.write(' '.join(['rank', os.environ['RANK'], sys.argv[1]]) + chr(10))"), ["hello"]
    )
    assert sorted(line for line in lines if line.startswith("rank")) == ["rank 0 hello", "rank 1 hello"]


@pytest.mark.campaign
def test_the_first_failing_rank_is_named(module: Callable[[str], str]) -> None:
    body = """
        if os.environ["RANK"] == "1":
            raise ValueError("nan at update 3")
        time.sleep(60)
    """
    with pytest.raises(WorkerError, match="rank 1 failed first: ValueError: nan at update 3"):
        printed(module(body), [])


@pytest.mark.campaign
def test_a_rank_that_was_killed_is_named(module: Callable[[str], str]) -> None:
    body = """
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), 9)
        time.sleep(60)
    """
    with pytest.raises(LostRankError, match=r"rank 1 was ended from outside by SIGKILL\. The system does"):
        printed(module(body), [])


@pytest.mark.campaign
def test_a_rank_that_was_killed_is_named_though_others_failed_because_of_it(module: Callable[[str], str]) -> None:
    body = """
        import torch
        import torch.distributed as dist
        from flowmill.tasks.runtime.ranks import torchrun_ranks

        with torchrun_ranks(torch.device("cpu"), 60, lambda beats: None) as ranks:
            for number in range(1000):
                if ranks.rank == 1 and number == 20:
                    os.kill(os.getpid(), 9)
                dist.all_reduce(torch.ones(1000))
    """
    with pytest.raises(LostRankError, match="rank 1 was ended from outside by SIGKILL"):
        printed(module(body), [])


@pytest.mark.campaign
@pytest.mark.usefixtures("forked_ranks")
def test_every_shard_is_taken_once_whoever_is_late_or_slow(module: Callable[[str], str], tmp_path: Path) -> None:
    cases = [(1, None), (0, None), (None, 0)]
    body = f"""
        from pathlib import Path
        import torch
        import torch.distributed as dist
        from flowmill.tasks.runtime.kv_store import KeyValueStore as Board
        from flowmill.tasks.runtime.ranks import torchrun_ranks
        from flowmill.tasks.execution.worker import deal
        from flowmill.tasks.stages.stage import Shard

        def take(number, ranks, board, late, slow):
            folder = Path(sys.argv[1]) / str(number)
            dist.barrier()
            time.sleep(3 * (ranks.rank == late))
            pending = lambda: [Shard(f"{{n:03d}}", n, n + 1) for n in range(8) if not (folder / f"{{n:03d}}").exists()]
            for shard in deal(ranks, board, pending):
                time.sleep(1 if ranks.rank == slow else 0.01)
                (folder / shard.name).touch()
                sys.stdout.write(f"took {{number}} {{ranks.rank}} {{shard.name}}\\n")
            dist.barrier()

        with torchrun_ranks(torch.device("cpu"), 60, lambda beats: None) as ranks:
            board = Board()
            for number, case in enumerate({cases}):
                take(number, ranks, board.below(f"case{{number}}"), *case)
    """
    for number in range(len(cases)):
        (tmp_path / "done" / str(number)).mkdir(parents=True)
    lines = printed(module(body), [str(tmp_path / "done")])
    took = [line.split()[1:] for line in lines if line.startswith("took")]
    for number, (_, slow) in enumerate(cases):
        mine = [(int(rank), name) for case, rank, name in took if int(case) == number]
        assert sorted(name for _, name in mine) == [f"{n:03d}" for n in range(8)]
        if slow is not None:
            assert len([rank for rank, _ in mine if rank == slow]) <= 2, "a slow rank idles nobody"


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


_STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "


@pytest.mark.campaign_cases("False", "True")
@pytest.mark.parametrize("stubborn", [False, True])
def test_stopping_leaves_no_process(module: Callable[[str], str], stubborn: bool) -> None:
    ignore = _STUBBORN if stubborn else ""
    launched = start(module(f"{ignore}sys.stdout.write(f'pid {{os.getpid()}}' + chr(10)); time.sleep(60)"))
    pids = []
    for line in launched.lines(1):
        if line is not None and line.startswith("pid"):
            pids.append(int(line.split()[1]))
        if len(pids) == 2:
            break
    launched.stop(grace=2)
    assert len(pids) == 2
    assert alive(pids) == []


@pytest.mark.campaign_cases("False")
@pytest.mark.parametrize("stubborn", [False, True])
def test_a_killed_caller_leaves_no_process(module: Callable[[str], str], tmp_path: Path, stubborn: bool) -> None:
    ignore = _STUBBORN if stubborn else ""
    name = module(f"{ignore}open(f'{{sys.argv[1]}}/{{os.getpid()}}', 'w'); time.sleep(60)")
    (tmp_path / "pids").mkdir()
    program = f"Program(module={name!r}, arguments=({str(tmp_path / 'pids')!r},), processes=2)"
    imports = (
        "from flowmill.tasks.execution.launch import Launched; "
        "from flowmill.tasks.execution.launchers import Local, Program"
    )
    code = f"{imports}; list(Launched({program}, Local()).lines(1))"
    parent = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while len(list((tmp_path / "pids").iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    pids = [int(path.name) for path in (tmp_path / "pids").iterdir()]
    assert len(pids) == 2
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 20
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert alive(pids) == []


# Several nodes


def free_port() -> int:
    """Return a port without a listener."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def two_nodes() -> Agents:
    """Two agents on this machine."""
    return Agents(endpoint=f"127.0.0.1:{free_port()}", prefixes=((), ()))


@pytest.mark.usefixtures("forked_ranks")
def test_agents_of_two_nodes_meet_and_hear_the_same(module: Callable[[str], str]) -> None:
    name = module("""
        line = sys.stdin.readline().strip() if os.environ["LOCAL_RANK"] == "0" else "nothing"
        said = [os.environ[name] for name in ("RANK", "GROUP_RANK", "WORLD_SIZE")]
        sys.stdout.write(" ".join(["heard", *said, line]) + chr(10))
    """)
    launched = Launched(Program(module=name, processes=2, nodes=2), two_nodes())
    try:
        launched.send("an-order")
        heard = sorted(line.split()[1:] for line in launched.lines(1) if line and line.startswith("heard"))
    finally:
        launched.stop()
    assert [rank for rank, *_ in heard] == ["0", "1", "2", "3"]
    assert {world for _, _, world, _ in heard} == {"4"}
    assert [line for *_, line in heard] == ["an-order", "nothing"] * 2


@pytest.mark.usefixtures("forked_ranks")
def test_a_failure_on_one_node_ends_the_others(module: Callable[[str], str]) -> None:
    body = """
        if os.environ["GROUP_RANK"] == "1":
            raise ValueError("no such model on this machine")
        time.sleep(60)
    """
    launched = Launched(Program(module=module(body), processes=1, nodes=2), two_nodes())
    begun = time.monotonic()
    try:
        with pytest.raises(WorkerError, match=r"rank 0 of agent \d failed first: ValueError: no such model on this"):
            list(launched.lines(1))
    finally:
        launched.stop()
    assert time.monotonic() - begun < 50


def test_the_command_of_an_agent_follows_what_starts_it(tmp_path: Path) -> None:
    launcher = Agents(endpoint="node1:29500", prefixes=(("srun", "--nodes=4", "--ntasks-per-node=1"),), python="/py")
    program = Program(module="flowmill.tasks.execution.worker", arguments=("auto",), processes=8, nodes=4)
    (first,), (second,) = (launcher.commands(program, tmp_path) for _ in range(2))
    assert first[:4] == ["srun", "--nodes=4", "--ntasks-per-node=1", "env"]
    for word in ("/py", "--nnodes=4", "--nproc-per-node=8", "--rdzv-endpoint=node1:29500", "--max-restarts=0"):
        assert word in first
    assert first[-2:] == ["flowmill.tasks.execution.worker", "auto"]
    ids = [next(word for word in command if word.startswith("--rdzv-id")) for command in (first, second)]
    assert ids[0] != ids[1], "ranks of an earlier start must not be met"


@pytest.mark.campaign
def test_a_rank_whose_parent_hangs_up_ends_though_it_is_busy() -> None:
    reading = "threading.Thread(target=worker._read, args=(queue.Queue(),)).start()"
    code = f"import queue, threading, time; from flowmill.tasks.execution import worker; {reading}; time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(timeout=50) == -signal.SIGKILL


# Who hangs


def beat(number: int, *, place: str = "rollout", still: float = 0.0, waiting: bool = False) -> Heartbeat:
    return Heartbeat(number=number, place=place, still=still, waiting=waiting)


def test_a_rank_that_falls_silent_stands_still_or_waits_for_others_is_told_apart() -> None:
    now = [0.0]
    watch = Watch(10, world=2, clock=lambda: now[0])
    watch.heard({0: beat(1), 1: beat(1)})
    now[0] = 8
    watch.heard({0: beat(2), 1: beat(1)})
    assert watch.hanging() is None, "ranks that were only just started are given a minute"
    now[0] = 11
    watch.heard({0: beat(3), 1: beat(1, place="shard 2")})
    assert watch.hanging() == "rank 1 has said nothing for 11 s; it was last at: rollout"
    watch.heard({0: beat(4), 1: beat(2)})
    assert watch.hanging() is None
    watch.heard({0: beat(5, still=30, waiting=True), 1: beat(3, place="update 3", still=12)})
    assert watch.hanging() == "rank 1 has not moved on for 12 s; it was last at: update 3"
    watch.heard({0: beat(6, still=30, waiting=True), 1: beat(4, still=12, waiting=True)})
    assert watch.hanging() == "all ranks wait for each other since 12 s; it was last at: rollout"
    watch.heard({0: beat(7, still=30, waiting=True), 1: beat(5, still=2)})
    assert watch.hanging() is None
    now[0] = 30
    assert watch.hanging() == "rank 0 has said nothing for 19 s; it was last at: rollout"


def test_ranks_may_wait_for_orders_as_long_as_it_takes() -> None:
    pulse = HeartbeatSender()
    pulse.at("rollout")
    with pulse.idle():
        pulse._changed -= 1000
        idle = pulse.beat(1)
    assert (idle.waiting, idle.still) == (True, 0.0)
    with pulse.waiting():
        pulse._changed -= 1000
        assert pulse.beat(2).still >= 1000
    watch = Watch(10, world=2)
    watch.heard({0: idle, 1: idle})
    assert watch.hanging() is None


def test_a_rank_that_never_comes_is_named() -> None:
    now = [0.0]
    watch = Watch(10, world=3, clock=lambda: now[0])
    now[0] = 55
    watch.heard({0: beat(1), 2: beat(1)})
    assert watch.hanging() is None
    now[0] = 61
    assert watch.hanging() == "rank 1 has said nothing since it was started 61 s ago"


# A run on two ranks


def execute(context: RunContext, name: str, epoch: int, slot: str = "", **heard: Callable[..., None]) -> StageRun:
    """Carry out a stage on the run's ranks."""
    run = stage_run(context, name, epoch, slot)
    if run.stage.on_ranks:
        session_of(context).executor(RankExecutor).run(run, run.pending(), Listener(**heard))
        run.finish()
    else:
        run.execute()
    return run


@pytest.mark.usefixtures("forked_ranks")
def test_ranks_score_with_rewards_that_work_on_the_accelerator(make_config: Make) -> None:
    reward = 'rewards=[{name: "tests.support.rewards:OnAccelerator", label: bright}]'
    context = begin_run(make_config("execution.processes=2", "rollout.groups_per_shard=1", reward))
    for name in ("base", "encode", "preprocess", "policy"):
        execute(context, name, 0)
    execute(context, "rollout", 1)
    scored = execute(context, "score", 1, "bright")
    assert session_of(context).executor(RankExecutor).starts == 1
    session_of(context).close()
    rows = read_rows(context.store, scored.stage.ref).to_pylist()
    assert {row["note"] for row in rows} == {"0", "1"}
    made = trajectories(context)
    assert len(rows) == len(made) == 16
    assert all(row["reward"] == pytest.approx(made[row["sample_id"]][2].mean(), rel=1e-5) for row in rows)
    assert session_of(context).host.loaded() == {}


@pytest.fixture
def two(make_config: Make) -> Iterator[RunContext]:
    """A run of two ranks, its first policy made."""
    extra = ["optimize.updates_per_epoch=1", "execution.micro_batch_size=8", "optimize.learning_rate=1e-4"]
    context = begin_run(make_config("execution.processes=2", *extra))
    for name in ("base", "encode", "preprocess", "policy"):
        execute(context, name, 0)
    yield context
    session_of(context).close()


@pytest.mark.usefixtures("forked_ranks")
def test_two_resident_processes_equal_one(two: RunContext, make_config: Make, tmp_path: Path) -> None:
    extra = ["optimize.updates_per_epoch=1", "execution.micro_batch_size=8", "optimize.learning_rate=1e-4"]
    one = prepare(make_config(f"store.root={tmp_path / 'one'}", *extra))
    committed: list[str] = []
    for epoch in (1, 2):
        run_epoch(one, epoch)
        execute(two, "rollout", epoch, on_commit=committed.extend)
        for name, slot in (("score", "jpeg_compressibility"), ("advantage", "")):
            execute(two, name, epoch, slot)
        execute(two, "optimize", epoch)
        execute(two, "evaluate", epoch)
        if epoch == 1:
            assert sorted(committed) == ["000000-000002", "000002-000004"]
            assert_same_trajectories(one, two)
            ours, theirs = weights(one), weights(two)
            assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) < 1e-5
            base = base_weights(one)
            assert max(float((ours[name] - base[name]).abs().max()) for name in ours) > 5e-5
            assert all(torch.isfinite(value).all() for value in theirs.values())
    assert session_of(two).executor(RankExecutor).starts == 1
    assert all(set(loads.values()) == {1} for loads in session_of(two).executor(RankExecutor).loads)
    assert all({"denoiser", "vae"} <= set(loads) for loads in session_of(two).executor(RankExecutor).loads)
    assert [set(loads) for loads in session_of(two).executor(RankExecutor).loads].count(
        {"denoiser", "vae", "text"}
    ) == 1
    assert session_of(two).host.loaded() == {}, "the process that orchestrates holds no parameter"


@pytest.mark.campaign_cases("full, one rank idle")
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(["execution.micro_batch_size=16"], id="full, one rank idle"),
        pytest.param(
            ["model.lora={rank: 4, alpha: 8}", "execution.offload=true", "optimize.ema={decay: 0.9}"],
            id="lora, offload, average",
            marks=pytest.mark.campaign,
        ),
        pytest.param(
            [
                "execution.checkpoint_every=1",
                "optimize.algorithm={name: grpo, options: {clip_range: 0.002, kl_coef: 0.5}}",
            ],
            id="full with a reference",
            marks=pytest.mark.campaign,
        ),
    ],
)
def test_spread_weights_train_as_whole_ones(make_config: Make, tmp_path: Path, settings: list[str]) -> None:
    extra = ["optimize.updates_per_epoch=3", "execution.micro_batch_size=8", "optimize.learning_rate=1e-3", *settings]
    whole = [setting for setting in extra if "offload" not in setting]
    one = prepare(make_config(f"store.root={tmp_path / 'one'}", *whole))
    run_epoch(one, 1)
    two = begin_run(make_config("execution.processes=2", "execution.strategy=fsdp", *extra))
    for name in ("base", "encode", "preprocess", "policy"):
        execute(two, name, 0)
    execute(two, "evaluate", 0)
    execute(two, "rollout", 1)
    for name, slot in (("score", "jpeg_compressibility"), ("advantage", "")):
        execute(two, name, 1, slot)
    execute(two, "optimize", 1)
    execute(two, "evaluate", 1)
    execute(two, "export", 1)
    assert session_of(two).executor(RankExecutor).starts == 1
    session_of(two).close()
    assert_same_trajectories(one, two)
    ours, theirs = weights(one), weights(two)
    assert ours.keys() == theirs.keys()
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) < 3e-5
    for context in (one, two):
        moments = stored(context, 1, OPTIMIZER)
        assert {name.partition("/")[0] for name in moments} == {"step", "exp_avg", "exp_avg_sq"}
    if "average" in str(settings):
        averages = [stored(context, 1, Weights.AVERAGE.value) for context in (one, two)]
        assert max(float((averages[0][name] - averages[1][name]).abs().max()) for name in ours) < 3e-5
    # What one process goes on with, a run on two left.
    again = open_run(two.store.root.uri, "small", overrides=["execution.processes=1", "execution.strategy=ddp"])
    found = session_of(again).host.trainable(again.policy_ref(1)).state()
    assert all(torch.equal(found[name], theirs[name]) for name in found)


@pytest.mark.parametrize("name", ["base", "export"])
def test_what_libraries_write_on_the_first_rank_alone_no_other_rank_takes(make_config: Make, name: str) -> None:
    context = prepare(make_config())
    run_epoch(context, 1)
    if name == "base":
        context = begin_run(make_config("run.name=other", "model.path=null", "model.build={name: tiny}"))
    stage = make_stage(context, name, 0 if name == "base" else 1)
    # The other rank does not even ask which shards there are, which nobody would answer here.
    run_share(StageRun(stage), ProcessExecutor(session_of(context)), Ranks(1, 2), Silent())
    assert context.store.committed(stage.ref) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_shard_that_another_run_commits_first_no_rank_works_on(
    make_config: Make, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    context = prepare(make_config())
    run_epoch(context, 1)
    run = StageRun(make_stage(context, "optimize", 1))
    monkeypatch.setattr(run, "pending", lambda: [Shard("policy")])
    monkeypatch.setattr(run, "work_on", lambda shard, is_due: pytest.fail("rank 0 works alone"))
    for name in ("join_shard", "joined"):
        monkeypatch.setattr(run, name, lambda shard: pytest.fail("rank 1 has trained nothing"))
    board = KeyValueStore(HashStore())
    if rank:
        for key, text in (("shards", '[["policy"]]'), ("due/policy", "false")):
            board.post(key, text)
    run_share(run, ProcessExecutor(session_of(context)), Ranks(rank, 2), board)
    assert board.read("due/policy") == "false"


class Silent(KeyValueStore):
    """Where nothing may be said or asked."""

    def __init__(self) -> None:
        pass


@pytest.mark.campaign
def test_two_nodes_equal_one_process(make_config: Make, tmp_path: Path) -> None:
    extra = ["optimize.updates_per_epoch=1", "execution.micro_batch_size=8", "optimize.learning_rate=1e-4"]
    one = prepare(make_config(f"store.root={tmp_path / 'one'}", *extra))
    run_epoch(one, 1)
    nodes = two_nodes()
    launcher = f"execution.launcher={{name: agents, options: {{endpoint: '{nodes.endpoint}', prefixes: [[], []]}}}}"
    two = begin_run(make_config("execution.nodes=2", launcher, *extra))
    for name in ("base", "encode", "preprocess", "policy"):
        execute(two, name, 0)
    execute(two, "rollout", 1)
    for name, slot in (("score", "jpeg_compressibility"), ("advantage", "")):
        execute(two, name, 1, slot)
    execute(two, "optimize", 1)
    assert session_of(two).executor(RankExecutor).starts == 1
    session_of(two).close()
    assert_same_trajectories(one, two)
    ours, theirs = weights(one), weights(two)
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) < 1e-5


@pytest.mark.usefixtures("forked_ranks")
def test_a_killed_rank_is_started_again_and_changes_nothing(two: RunContext) -> None:
    reported: list[str] = []
    two.reporter.message = reported.append  # type: ignore[method-assign]
    killed: list[int] = []

    def kill_one() -> None:
        if killed:
            return
        assert session_of(two).executor(RankExecutor)._launched is not None
        ranks = psutil.Process(session_of(two).executor(RankExecutor)._launched.pids[0]).children(recursive=True)
        if len(ranks) == 2:
            killed.append(ranks[-1].pid)
            ranks[-1].kill()

    execute(two, "rollout", 1, on_look=kill_one)
    assert len(killed) == 1
    assert session_of(two).executor(RankExecutor).starts == 2
    assert any("was ended from outside by SIGKILL" in text for text in reported)
    assert two.store.require(two.chain.require(1, "rollout").ref).rows == 16


@pytest.mark.campaign
@pytest.mark.usefixtures("forked_ranks")
def test_a_rank_that_hangs_is_named(two: RunContext) -> None:
    section = two.config.execution.model_copy(update={"stall_s": 10.0})
    session_of(two).executor(RankExecutor)._execution = section
    stopped: list[psutil.Process] = []

    def stop_one() -> None:
        assert session_of(two).executor(RankExecutor)._launched is not None
        ranks = psutil.Process(session_of(two).executor(RankExecutor)._launched.pids[0]).children(recursive=True)
        if not stopped:
            stopped.append(ranks[-1])
            ranks[-1].suspend()

    with pytest.raises(WorkerError, match=r"rollout@1: rank 1 has said nothing for \d+ s; .*raise\s+execution.stall_s"):
        execute(two, "rollout", 1, on_look=stop_one)
    assert not stopped[0].is_running()
