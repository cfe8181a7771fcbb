"""Starts the ranks and makes sure that they never outlive their caller.

torch starts every rank in its own session, so a group kill misses them; the tree is listed before it is signaled, and
through the kernel's parent-death signal the agents die with their parent and the ranks with their agent.
"""

from __future__ import annotations

import ctypes
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from configs.errors import LostRankError, WorkerError

_GRACE_S = 10.0
_RANK = Path(__file__).with_name("rank.py")
_PR_SET_PDEATHSIG = 1
_ENDED = object()


def agent(module: str, arguments: Sequence[str], *, processes: int, logs: Path) -> list[str]:
    """Return the command of one torchrun agent that runs a module in several processes of this machine.

    Args:
        module: module whose ``__main__`` is decorated with torch's ``record``.
        arguments: its arguments.
        processes: number of ranks.
        logs: folder for the errors of ranks.
    """
    command = [sys.executable, "-u", "-m", "torch.distributed.run", "--standalone", "--nnodes=1"]
    # Restarts are not torchrun's: with gloo they are unreliable, and a committed checkpoint makes them ours.
    command += [f"--nproc-per-node={processes}", "--max-restarts=0", "--monitor-interval=0.2", "--log-dir", str(logs)]
    return [*command, str(_RANK), module, *arguments]


class Launched:
    """Started agents and their ranks: what they print, what they are told, and how they end."""

    def __init__(self, module: str, arguments: Sequence[str], *, processes: int) -> None:
        """Start ``python -m module arguments`` in several processes of this machine."""
        self._folder = tempfile.TemporaryDirectory(prefix="flowmill-torchrun-", ignore_cleanup_errors=True)
        self._lines: queue.Queue[object] = queue.Queue()
        self._tail: deque[str] = deque(maxlen=30)
        self._code: int | None = None
        self._error: OSError | None = None
        read, self._write = os.pipe()
        command = agent(module, arguments, processes=processes, logs=Path(self._folder.name))
        started = threading.Event()
        # The parent-death signal is that of the thread that forks: it must live as long as the agent.
        self._keeper = threading.Thread(target=self._keep, args=(command, read, started), daemon=True, name="torchrun")
        self._keeper.start()
        started.wait()
        os.close(read)
        if self._error is not None:
            raise WorkerError(f"torchrun cannot be started: {self._error}")

    def tell(self, line: str) -> None:
        """Give the first rank a line on its standard input; ranks that have ended do not hear it."""
        with suppress(BrokenPipeError):
            os.write(self._write, f"{line}\n".encode())

    def lines(self, patience: float) -> Iterator[str | None]:
        """Yield what the ranks print, and None whenever they say nothing for ``patience`` seconds, until they end.

        Raises:
            WorkerError: a rank failed; the message is that of the first one to fail.
        """
        while True:
            try:
                line = self._lines.get(timeout=patience)
            except queue.Empty:
                yield None
                continue
            if line is _ENDED:
                self._keeper.join()
                if self._code:
                    raise self._failure(self._code)
                return
            assert isinstance(line, str)
            self._tail.append(line)
            yield line

    def stop(self, grace: float = _GRACE_S) -> None:
        """End all processes: ask first, kill what is left after the grace period; then forget their files."""
        if self._write >= 0:
            os.close(self._write)
            self._write = -1
        stop_tree(self._process, grace)
        self._keeper.join(grace)
        self._folder.cleanup()

    def leave(self, patience: float = _GRACE_S) -> None:
        """Let the ranks end by themselves, as they do when they are told nothing more, and stop those that do not."""
        if self._write >= 0:
            os.close(self._write)
            self._write = -1
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        self.stop()

    def _keep(self, command: Sequence[str], stdin: int, started: threading.Event) -> None:
        try:
            self._process = subprocess.Popen(
                command,
                stdin=stdin,
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
                preexec_fn=lambda: die_with_parent(signal.SIGKILL),
            )
        except OSError as error:
            self._error = error
            return
        finally:
            started.set()
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.rstrip("\n"))
        self._code = self._process.wait()
        self._lines.put(_ENDED)

    def _failure(self, code: int) -> WorkerError:
        rank, message = first_error(Path(self._folder.name))
        if message:
            return WorkerError(f"torchrun: rank {rank} failed first: {message}")
        killed = _killed(self._tail) if code > 0 else f"torchrun was ended from outside by {_signal(-code)}."
        if killed:
            return LostRankError(killed)
        return WorkerError(
            f"torchrun ended with code {code} and left no error file. Its last lines:\n  " + "\n  ".join(self._tail)
        )


def die_with_parent(by: signal.Signals = signal.SIGTERM) -> None:
    """Ask the kernel to end this process when its parent dies, however it dies (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL("libc.so.6").prctl(_PR_SET_PDEATHSIG, by)


def stop_tree(process: subprocess.Popen[str], grace: float) -> None:
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


def _signal(number: int) -> str:
    return signal.Signals(number).name


def _killed(tail: Sequence[str]) -> str:
    """Return which rank a signal ended, from torchrun's report; '' if none was."""
    report = "\n".join(tail).partition("Root Cause")[2]
    found = re.search(r"rank\s*: (\d+).*?exitcode\s*: -(\d+)", report, re.DOTALL)
    if found is None:
        return ""
    name = _signal(int(found[2]))
    cause = " The system does this when memory runs out." if name == "SIGKILL" else ""
    return f"rank {found[1]} was ended from outside by {name}.{cause}"
