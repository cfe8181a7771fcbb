"""Starts torchrun for a stage and makes sure that it never outlives its caller.

torch starts every rank in its own session, so a group kill misses them; the tree is listed before it is signalled,
and the agent dies with its parent through the kernel's parent-death signal.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from configs.errors import WorkerError

_GRACE_S = 15.0
_RANK = Path(__file__).with_name("rank.py")
_PR_SET_PDEATHSIG = 1


def run_torchrun(module: str, arguments: Sequence[str], *, processes: int, on_line: Callable[[str], None]) -> None:
    """Run a module, as ``python -m module arguments`` would, in several processes of this machine and wait.

    Args:
        module: module whose ``__main__`` is decorated with torch's ``record``.
        arguments: its arguments.
        processes: number of ranks.
        on_line: called with every line the ranks print.

    Raises:
        WorkerError: a rank failed; the message is that of the first one to fail.
    """
    with tempfile.TemporaryDirectory(prefix="flowmill-torchrun-") as logs:
        command = [sys.executable, "-u", "-m", "torch.distributed.run", "--standalone", "--nnodes=1"]
        # Restarts are not torchrun's: with gloo they are unreliable, and a committed checkpoint makes them ours.
        command += [f"--nproc-per-node={processes}", "--max-restarts=0", "--monitor-interval=0.2", "--log-dir", logs]
        process = subprocess.Popen(
            [*command, str(_RANK), module, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            bufsize=1,
            errors="replace",
            env={
                **os.environ,
                "PYTHONUNBUFFERED": "1",
                # The working directory is the user's: what lies there must not hide libraries. See rank.py.
                "PYTHONSAFEPATH": "1",
                "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            },
            preexec_fn=die_with_parent,
        )
        tail: deque[str] = deque(maxlen=20)
        try:
            assert process.stdout is not None
            for line in process.stdout:
                tail.append(line.rstrip("\n"))
                on_line(tail[-1])
            code = process.wait()
        finally:
            # Also on Ctrl-C, cancellation and errors in on_line.
            stop_tree(process)
        if code:
            rank, message = first_error(Path(logs))
            raise WorkerError(f"torchrun: rank {rank} failed first: {message}" if message else _unknown(code, tail))


def die_with_parent() -> None:
    """Ask the kernel to terminate this process when its parent dies, however it dies (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL("libc.so.6").prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def stop_tree(process: subprocess.Popen[str], grace: float = _GRACE_S) -> None:
    """Terminate a process and all its descendants; kill what is left after the grace period."""
    if process.poll() is not None:
        return
    try:
        parent = psutil.Process(process.pid)
        family = [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    process.terminate()
    _, alive = psutil.wait_procs(family, timeout=grace)
    for member in alive:
        member.kill()
    psutil.wait_procs(alive, timeout=5)
    process.wait()


def first_error(logs: Path) -> tuple[int | None, str]:
    """Return rank and message of the earliest error file that torch's ``record`` wrote."""
    found: list[tuple[int, int, str]] = []
    for path in logs.rglob("error.json"):
        content = json.loads(path.read_text()).get("message", "")
        message = content.get("message", "") if isinstance(content, dict) else str(content)
        found.append((path.stat().st_mtime_ns, int(path.parent.name), message))
    if not found:
        return None, ""
    _, rank, message = min(found)
    return rank, message


def _unknown(code: int, tail: Sequence[str]) -> str:
    return f"torchrun ended with code {code} and left no error file. Its last lines:\n  " + "\n  ".join(tail)
