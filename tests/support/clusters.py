"""Servers and clusters of others, as processes that can be killed and started again: Prefect's, Dask's and Ray's."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from flowmill.flows.server import _answers
from tests.support.s3 import free_port

ROOT = Path(__file__).parents[2]
_BIN = Path(sys.executable).parent


def wait_until(condition: Callable[[], bool], timeout: float) -> None:
    """Wait until something is true."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.5)


def listens(port: int) -> bool:
    """Return whether something accepts connections at a port of this machine."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


@dataclass
class Started:
    """One process with its descendants."""

    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    is_ready: Callable[[], bool] = lambda: True
    """Whether it can be used."""
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it unless it lives, as a shell in the background would, without Ctrl-C; wait until it is ready."""
        if self.process is None or self.process.poll() is not None:
            self.kill()
            self.process = subprocess.Popen(
                self.command,
                cwd=ROOT,
                env=self.environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
            )
        wait_until(self.is_ready, 120)

    def family(self) -> list[psutil.Process]:
        """Return it, first, and its descendants."""
        with contextlib.suppress(psutil.NoSuchProcess):
            assert self.process is not None
            own = psutil.Process(self.process.pid)
            return [own, *own.children(recursive=True)]
        return []

    def kill(self) -> None:
        """Kill it with all of its descendants."""
        if self.process is not None:
            for member in self.family():
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
            self.process.wait()


@contextmanager
def running(started: Started) -> Iterator[Started]:
    """Keep a process running inside the block."""
    try:
        started.start()
        yield started
    finally:
        started.kill()


def prefect_api(environment: Mapping[str, str]) -> Started:
    """Return a Prefect server with its scheduler; its environment names it to its clients."""
    port = free_port()
    variables = {**environment, "PYTHONPATH": str(ROOT), "PREFECT_API_URL": f"http://127.0.0.1:{port}/api"}
    variables["PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS"] = "2"
    variables["PREFECT_SERVER_CONCURRENCY_INITIAL_DEPLOYMENT_LEASE_DURATION"] = "60"
    options = ["--host", "127.0.0.1", "--port", str(port), "--no-ui"]
    command = [sys.executable, "-m", "prefect", "server", "start", *options]
    return Started(command, variables, lambda: _answers(f"{variables['PREFECT_API_URL']}/health"))


def prefect_worker(environment: Mapping[str, str]) -> Started:
    """Return a worker of flowmill's pool."""
    return Started([sys.executable, "-m", "flowmill.flows.cli", "worker"], environment)


def dask_scheduler(environment: Mapping[str, str]) -> tuple[str, Started]:
    """Return the address of a Dask scheduler without workers, and its process."""
    port = free_port()
    command = [str(_BIN / "dask"), "scheduler", "--host", "127.0.0.1", "--port", str(port), "--no-dashboard"]
    return f"tcp://127.0.0.1:{port}", Started(command, environment, lambda: listens(port))


def dask_worker(address: str, environment: Mapping[str, str]) -> Started:
    """Return a worker of a scheduler, with the nanny that starts it again."""
    options = ["--host", "127.0.0.1", "--nworkers", "1", "--nthreads", "1", "--no-dashboard"]
    return Started([str(_BIN / "dask"), "worker", address, *options], environment)


@contextmanager
def ray_cluster(environment: Mapping[str, str]) -> Iterator[tuple[str, dict[str, str], Started]]:
    """Give a Ray cluster of two workers on this machine: its address, the variables of its token, and its process."""
    port = free_port()
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    options = ["--num-cpus=2", "--include-dashboard=false", "--disable-usage-stats", f"--port={port}", "--block"]
    options += ["--node-ip-address=127.0.0.1", "--object-store-memory=100000000"]
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="ray") as folder:
        command = [str(_BIN / "ray"), "start", "--head", *options, f"--temp-dir={folder}"]
        head = Started(command, {**environment, **token}, lambda: listens(port))
        with running(head):
            yield f"127.0.0.1:{port}", token, head
