"""Starts the ranks and makes sure that they never outlive their caller.

torch starts every rank in its own session, so killing a process group misses them. So the process tree is listed before
it is signaled. The kernel's parent-death signal ends agents with their parent, and ranks with their agent.
"""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from flowmill.configs.errors import LostRankError, WorkerError
from flowmill.tasks.execution.launchers import Launcher, Program
from flowmill.tasks.execution.parent_death import die_with_parent

_GRACE_S = 10.0
#: Output lines to keep, for torchrun's failure report with a traceback, and lines to show.
_TAIL, _SHOWN = 300, 20


class Launched:
    """Started agents and their ranks: their input, output and termination."""

    def __init__(self, program: Program, launcher: Launcher) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="flowmill-torchrun-", ignore_cleanup_errors=True)
        self._lines: queue.Queue[str | int] = queue.Queue()
        self._tail: deque[str] = deque(maxlen=_TAIL)
        self._agents: list[_Agent] = []
        for command in launcher.commands(program, Path(self._folder.name)):
            try:
                self._agents.append(_Agent(command, self._lines))
            except OSError as error:
                self.stop()
                raise WorkerError(f"'{command[0]}' cannot be started: {error.strerror or error}.") from None

    def send(self, line: str) -> None:
        """Write a line to the standard input of every node's first rank; ended ranks are skipped."""
        for agent in self._agents:
            agent.send(line)

    def lines(self, patience: float) -> Iterator[str | None]:
        """Yield the ranks' output, and None after every ``patience`` seconds of silence, until they end."""
        running = len(self._agents)
        while running:
            try:
                line = self._lines.get(timeout=patience)
            except queue.Empty:
                yield None
                continue
            if isinstance(line, str):
                self._tail.append(line)
                yield line
            elif line:
                # Ranks of other nodes detect the failure themselves, but may take minutes.
                self._end()
                raise self._failure(line)
            else:
                running -= 1

    def stop(self, grace: float = _GRACE_S) -> None:
        """Terminate all processes, kill the rest after the grace period, and remove their files."""
        self._end(grace)
        self._folder.cleanup()

    def leave(self, patience: float = _GRACE_S) -> None:
        """Close the ranks' input, so that they end by themselves, and stop those that do not."""
        for agent in self._agents:
            agent.hang_up()
        for agent in self._agents:
            with suppress(subprocess.TimeoutExpired):
                agent.process.wait(patience)
        self.stop()

    @property
    def pids(self) -> list[int]:
        """The agents' process ids."""
        return [agent.process.pid for agent in self._agents]

    def _end(self, grace: float = _GRACE_S) -> None:
        for agent in self._agents:
            agent.hang_up()
        stop_trees([agent.process for agent in self._agents], grace)

    def _failure(self, code: int) -> WorkerError:
        # Check for a killed rank first: it makes other ranks fail, and only those write error files.
        killed = _killed(self._tail) if code > 0 else f"torchrun was ended from outside by {_signal(-code)}."
        if killed:
            return LostRankError(killed)
        rank, message = first_error(Path(self._folder.name))
        if message:
            return WorkerError(f"torchrun: {rank} failed first: {message}")
        return WorkerError(
            f"torchrun ended with code {code} and left no error file. Its last lines:\n  "
            + "\n  ".join([*self._tail][-_SHOWN:])
        )


class _Agent:
    """One started command; its output lines, and finally its exit code, go into a queue."""

    def __init__(self, command: Sequence[str], lines: queue.Queue[str | int]) -> None:
        read, self._write = os.pipe()
        self._lines = lines
        self._error: BaseException | None = None
        started = threading.Event()
        # The parent-death signal is tied to the thread that forks, so the thread must live as long as the process.
        threading.Thread(target=self._keep, args=(command, read, started), daemon=True, name="torchrun").start()
        started.wait()
        os.close(read)
        if self._error is not None:
            self.hang_up()
            raise self._error

    def send(self, line: str) -> None:
        with suppress(BrokenPipeError):
            os.write(self._write, f"{line}\n".encode())

    def hang_up(self) -> None:
        """Close the command's input."""
        if self._write >= 0:
            os.close(self._write)
            self._write = -1

    def _keep(self, command: Sequence[str], stdin: int, started: threading.Event) -> None:
        try:
            self.process = start_agent(command, stdin)
        except BaseException as error:  # noqa: BLE001 - the starting thread receives it
            self._error = error
            return
        finally:
            started.set()
        assert self.process.stdout is not None
        try:
            for line in self.process.stdout:
                self._lines.put(line.rstrip("\n"))
        finally:
            self._lines.put(self.process.wait())


def start_agent(command: Sequence[str], stdin: int) -> subprocess.Popen[str]:
    """Start an agent that dies with the calling thread; its ``stdout`` carries the output of all its ranks.

    Raises:
        OSError: the command cannot be started.
    """
    return subprocess.Popen(
        command,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        bufsize=1,
        errors="replace",
        preexec_fn=lambda: die_with_parent(signal.SIGKILL),
    )


def stop_trees(processes: Sequence[subprocess.Popen[str]], grace: float) -> None:
    """Terminate processes and all their descendants; kill the rest after the grace period."""
    family: list[psutil.Process] = []
    for process in processes:
        if process.poll() is None:
            with suppress(psutil.NoSuchProcess):
                parent = psutil.Process(process.pid)
                family += [parent, *parent.children(recursive=True)]
    for process in processes:
        process.terminate()
    _, alive = psutil.wait_procs(family, timeout=grace)
    for member in alive:
        member.kill()
    psutil.wait_procs(alive, timeout=5)
    for process in processes:
        process.wait()


def first_error(logs: Path) -> tuple[str, str]:
    """Return the rank and the message of the earliest error file that torch's ``record`` wrote; '' if there is none.

    torchrun names the files by the rank's number on its machine, so with several agents the rank includes the agent.
    """
    errors: list[tuple[int, str, str]] = []
    for path in logs.rglob("error.json"):
        content = json.loads(path.read_text()).get("message", "")
        message = content.get("message", "") if isinstance(content, dict) else str(content)
        agent = path.relative_to(logs).parts[0]
        of_agent = f" of agent {agent.removeprefix('agent')}" if agent.startswith("agent") else ""
        errors.append((path.stat().st_mtime_ns, f"rank {path.parent.name}{of_agent}", message))
    if not errors:
        return "", ""
    _, rank, message = min(errors)
    return rank, message


def _signal(number: int) -> str:
    return signal.Signals(number).name


def _killed(tail: Sequence[str]) -> str:
    """Return a message on a rank that an external signal ended, from torchrun's report; '' if there is none."""
    failures = re.findall(r"rank\s*: (\d+) .*\n.*exitcode\s*: -(\d+)", "\n".join(tail))
    ended = [(rank, int(number)) for rank, number in failures if int(number) != signal.SIGTERM]
    if not ended:
        return ""
    rank, name = ended[0][0], _signal(ended[0][1])
    cause = " The system does this when memory runs out." if name == "SIGKILL" else ""
    return f"rank {rank} was ended from outside by {name}.{cause}"
