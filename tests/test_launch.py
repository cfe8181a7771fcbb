"""torchrun for real: errors with the right rank, no orphans, and the same results as one process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from configs.errors import WorkerError
from configs.schema import RunConfig
from tasks.launch import run_torchrun
from tasks.stage import StageRun
from tasks.stages import make_stage
from tests.conftest import prepare, run_epoch
from tests.test_stages import assert_same_trajectories, weights

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent


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


def test_lines_come_through(module: Callable[[str], str]) -> None:
    lines: list[str] = []
    name = module("print('rank', os.environ['RANK'], sys.argv[1], flush=True)")
    run_torchrun(name, ["hello"], processes=2, on_line=lines.append)
    assert sorted(line for line in lines if line.startswith("rank")) == ["rank 0 hello", "rank 1 hello"]


def test_the_first_failing_rank_is_named(module: Callable[[str], str]) -> None:
    body = """
        if os.environ["RANK"] == "1":
            raise ValueError("nan at update 3")
        time.sleep(60)
    """
    with pytest.raises(WorkerError, match="rank 1 failed first: ValueError: nan at update 3"):
        run_torchrun(module(body), [], processes=2, on_line=lambda line: None)


@pytest.mark.parametrize(("late", "slow"), [(1, None), (0, None), (None, 0)])
def test_every_shard_is_taken_once_whoever_is_late_or_slow(
    module: Callable[[str], str], tmp_path: Path, late: int | None, slow: int | None
) -> None:
    body = f"""
        from pathlib import Path
        from tasks.ranks import torchrun_ranks
        from tasks.stage import Shard
        from tasks.worker import deal

        folder = Path(sys.argv[1])
        with torchrun_ranks() as ranks:
            ranks.barrier()
            time.sleep(3 * (ranks.rank == {late}))
            pending = lambda: [Shard(f"{{n:03d}}", n, n + 1) for n in range(8) if not (folder / f"{{n:03d}}").exists()]
            for shard in deal(ranks, pending):
                time.sleep(1 if ranks.rank == {slow} else 0.01)
                (folder / shard.name).touch()
                print("took", ranks.rank, shard.name, flush=True)
            ranks.barrier()
    """
    (tmp_path / "done").mkdir()
    lines: list[str] = []
    run_torchrun(module(body), [str(tmp_path / "done")], processes=2, on_line=lines.append)
    took = [line.split()[1:] for line in lines if line.startswith("took")]
    assert sorted(name for _, name in took) == [f"{n:03d}" for n in range(8)]
    if slow is not None:
        assert len([rank for rank, _ in took if int(rank) == slow]) <= 2, "a slow rank idles nobody"


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


def test_an_error_in_the_caller_leaves_no_process(module: Callable[[str], str]) -> None:
    pids: list[int] = []

    def on_line(line: str) -> None:
        if line.startswith("pid"):
            pids.append(int(line.split()[1]))
        if len(pids) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_torchrun(module("print('pid', os.getpid(), flush=True); time.sleep(60)"), [], processes=2, on_line=on_line)
    assert len(pids) == 2
    assert alive(pids) == []


def test_a_killed_caller_leaves_no_process(module: Callable[[str], str], tmp_path: Path) -> None:
    name = module("open(f'{sys.argv[1]}/{os.getpid()}', 'w'); time.sleep(60)")
    (tmp_path / "pids").mkdir()
    call = f"run_torchrun({name!r}, [{str(tmp_path / 'pids')!r}], processes=2, on_line=print)"
    code = f"from tasks.launch import run_torchrun; {call}"
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
    deadline = time.monotonic() + 30
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert alive(pids) == []


def test_two_processes_equal_one(make_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    from flows.stages import _listener
    from tasks.worker import PREFIX

    extra = ["optimize.updates_per_epoch=1", "execution.micro_batch_size=8", "optimize.learning_rate=1e-4"]
    one = prepare(make_config(f"store.root={tmp_path / 'one'}", *extra))
    run_epoch(one, 1)
    two = prepare(make_config("execution.processes=2", *extra))
    committed: list[str] = []

    def spread(name: str, slot: str = "") -> None:
        run = StageRun(make_stage(two, name, 1, slot))
        path = tmp_path / "config.json"
        path.write_text(two.config.model_dump_json())
        arguments = [str(path), name, "1", slot, str(run.ref)]
        listen = _listener(run.stage, committed.append)
        run_torchrun(
            "tasks.worker", arguments, processes=2, on_line=lambda line: listen(line) if PREFIX in line else None
        )
        run.finish()

    spread("rollout")
    assert sorted(committed) == ["000000-000002", "000002-000004"]
    assert_same_trajectories(one, two)
    for name, slot in (("score", "jpeg_compressibility"), ("advantage", "")):
        StageRun(make_stage(two, name, 1, slot)).execute()
    spread("optimize")
    ours, theirs = weights(one), weights(two)
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) < 1e-5
    base = one._base_weights()
    assert max(float((ours[name] - base[name]).abs().max()) for name in ours) > 5e-5
    assert all(torch.isfinite(value).all() for value in theirs.values())
