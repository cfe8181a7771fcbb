"""All strategies on all devices of the machine: a run, and one whose rank is killed and that is gone on with."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import torch

from flowmill.tasks.runs.opening import open_run
from tools.gpu.lines import Line, Lines, equal

ROOT = Path(__file__).parents[2]
STRATEGIES = {
    "ddp": ("execution.strategy=ddp",),
    "fsdp": ("execution.strategy=fsdp",),
    "fsdp, offload": ("execution.strategy=fsdp", "execution.offload=true"),
    "fsdp, offload of parameters": ("execution.strategy=fsdp", "execution.offload=parameters"),
    "fsdp, offload of the optimizer": ("execution.strategy=fsdp", "execution.offload=optimizer"),
    "fsdp, groups of 2": ("execution.strategy=fsdp", "execution.fsdp_size=2"),
    "ddp, context_parallel 2": ("execution.strategy=ddp", "execution.context_parallel=2"),
}
#: Seconds a run may take.
_LIMIT_S = 240


def measure(device: torch.device, lines: Lines, *, count: int) -> None:
    """Add, for each strategy, whether a killed rank changes anything."""
    if count < 2:
        lines.append(Line(label="ranks: several devices", measured="one device alone, so nothing was tried"))
        return
    for name, overrides in STRATEGIES.items():
        if name.endswith(" 2") and count % 2:
            continue
        with lines.told(f"ranks, {name}"), tempfile.TemporaryDirectory() as folder:
            lines += _strategy(name, overrides, device, count, Path(folder))


def _strategy(name: str, overrides: Sequence[str], device: torch.device, count: int, folder: Path) -> Iterator[Line]:
    given = (*overrides, f"execution.processes={count}", f"execution.device={device.type}", "model.dtype=bfloat16")
    begun = time.perf_counter()
    _wait(_started(folder / "whole", given))
    yield Line(label=f"ranks, {name}: seconds of a run on {count}", measured=time.perf_counter() - begun, ok=True)
    killed = _started(folder / "killed", given)
    _kill_a_rank(killed, folder / "killed")
    killed.wait(_LIMIT_S)
    _wait(_started(folder / "killed", given))
    digests = [_digest(folder / each) for each in ("whole", "killed")]
    yield equal(f"ranks, {name}: digest after a rank was killed is the same", 1.0, float(digests[0] == digests[1]))


def _started(root: Path, overrides: Sequence[str]) -> subprocess.Popen[bytes]:
    config = ROOT / "configs" / "tiny_sd3.yaml"
    settings = [f"store.root={root}", "run.name=ranks", "execution.deterministic=true", *overrides]
    command = [sys.executable, "-m", "flowmill.flows.cli", "run", str(config)]
    for setting in settings:
        command += ["--set", setting]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def _wait(process: subprocess.Popen[bytes]) -> None:
    _, said = process.communicate(timeout=_LIMIT_S)
    if process.returncode:
        raise RuntimeError(said.decode(errors="replace").strip()[-300:])


def _kill_a_rank(process: subprocess.Popen[bytes], root: Path) -> None:
    """Kill the last rank as soon as the first artifact of an epoch is there."""
    until = time.monotonic() + _LIMIT_S
    while process.poll() is None and time.monotonic() < until:
        ranks = [each for each in psutil.Process(process.pid).children(recursive=True) if _is_rank(each)]
        if ranks and any(root.rglob("rollout*")):
            os.kill(ranks[-1].pid, signal.SIGKILL)
            return
        time.sleep(0.1)
    raise RuntimeError("the run was over before a rank could be killed")


def _is_rank(process: psutil.Process) -> bool:
    try:
        return "RANK" in process.environ()
    except psutil.Error:
        return False


def _digest(root: Path) -> str:
    context = open_run(str(root), "ranks")
    digest: str = context.store.require(context.chain.require(context.config.run.epochs, "optimize").ref).digest
    return digest
