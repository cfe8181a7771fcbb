"""Command lines without the seconds that imports take: a process that has imported everything forks one for each.

Every command is a process of its own, with its own environment, folder and output, and goes through
``flowmill.flows.cli.main``. What is read while modules are imported is that of the process that forks: variables of
``READ_AT_IMPORT`` need a start of their own.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn

ROOT = Path(__file__).parents[2]
READ_AT_IMPORT = ("COLUMNS", "MLFLOW_", "OMP_", "TORCH", "HF_", "PYTHONHASHSEED")
#: What the arguments of an agent of ranks begin with, see ``tests.support.forked_ranks``.
AGENT = "--agent"
#: What carries one out; it builds upon this file.
_AGENTS = "tests.support.forked_ranks"
_MODULES = (
    "flowmill.tasks.execution.worker",
    "flowmill.flows.cli.run",
    "flowmill.flows.cli.stage",
    "flowmill.flows.pipeline",
    "flowmill.flows.stages",
    "flowmill.tasks.tracking.client",
    "mlflow",
    "flowmill.models.policies.sd3",
    "flowmill.models.quickstart.build",
    "flowmill.models.weights.lora",
    "peft",
    "diffusers.loaders.lora_pipeline",
    "diffusers.models.transformers.transformer_sd3",
    "diffusers.models.autoencoders.autoencoder_kl",
    "diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3",
    "flowmill.tasks.stages.optimize",
    "flowmill.tasks.training.epoch",
    "flowmill.tasks.stages.export",
    "flowmill.tasks.checks.check",
    "prefect.client.orchestration",
)


class Preloaded:
    """The process that forks, seen from the tests."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Start it; the first command waits until everything is imported."""
        self._folder = tempfile.TemporaryDirectory(prefix="flowmill-preloaded-")
        self.address = str(Path(self._folder.name) / "socket")
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(self.address)
            listening.listen()
            command = [sys.executable, "-m", "tests.support.preloaded", str(listening.fileno())]
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=dict(environment), pass_fds=[listening.fileno()], stderr=subprocess.DEVNULL
            )

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait(10)
        self._folder.cleanup()


def run_forked(
    address: str, arguments: Sequence[str], *, cwd: Path, env: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """Have a command line carried out, and return what came of it.

    Raises:
        subprocess.TimeoutExpired: it takes longer; it is ended.
    """
    command = ["flowmill", *arguments]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        streams = [out.fileno(), err.fileno()]
        code = ask(address, arguments, streams, cwd=str(cwd), env=env, timeout=timeout)
        out.seek(0)
        err.seek(0)
        found = subprocess.CompletedProcess(command, code, out.read(), err.read())
    if code == -signal.SIGALRM:
        raise subprocess.TimeoutExpired(command, timeout, found.stdout, found.stderr)
    return found


def ask(
    address: str,
    arguments: Sequence[str],
    streams: Sequence[int],
    *,
    cwd: str,
    env: Mapping[str, str],
    timeout: float = 600,
) -> int:
    """Have a command line carried out, and return its exit code.

    Args:
        address: where the process that forks listens.
        arguments: of ``flowmill``, or ``-c`` and Python code.
        streams: descriptors of its output and its errors, before them that of its input if it has one.
        cwd: its folder.
        env: its environment.
        timeout: seconds after which a signal ends it.
    """
    request = {"arguments": list(arguments), "cwd": cwd, "env": dict(env), "timeout": timeout}
    with _asked(address, request, streams) as connection:
        _number(connection)
        return os.waitstatus_to_exitcode(_number(connection))


class Forked:
    """A command line in a session of its own that goes on next to the test, as ``subprocess.Popen`` has it."""

    #: Those of this process, as their environment does not show in the system.
    all: ClassVar[list[Forked]] = []

    def __init__(
        self,
        address: str,
        arguments: Sequence[str],
        *,
        cwd: Path,
        env: Mapping[str, str],
        streams: Sequence[int] | None = None,
    ) -> None:
        """Begin it; what it writes is kept for ``communicate``, unless it is given streams."""
        self.args = ["flowmill", *arguments]
        self.returncode: int | None = None
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - as long as this is
        request = {"arguments": list(arguments), "cwd": str(cwd), "env": dict(env), "timeout": 1200, "session": True}
        self._connection = _asked(address, request, streams or [self._output.fileno()] * 2)
        self.pid = _number(self._connection)
        self.all.append(self)

    def poll(self) -> int | None:
        """Return its exit code, None while it is at work."""
        if self.returncode is None and select.select([self._connection], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit code.

        Raises:
            subprocess.TimeoutExpired: it takes longer.
        """
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = os.waitstatus_to_exitcode(_number(self._connection))
            self._connection.close()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[bytes, None]:
        """Return what it wrote once it has ended."""
        self.wait(timeout)
        self._output.seek(0)
        return self._output.read(), None

    def send_signal(self, number: int) -> None:
        """Send a signal, if it has not ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _asked(address: str, request: Mapping[str, Any], streams: Sequence[int]) -> socket.socket:
    """Return a connection on which come the process id and, in the end, the status."""
    text = json.dumps(request).encode()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    socket.send_fds(connection, [f"{len(text):8d}".encode()], list(streams))
    connection.sendall(text)
    return connection


def _number(connection: socket.socket) -> int:
    return int(connection.recv(16, socket.MSG_WAITALL))


def import_all() -> None:
    """Import what commands and ranks do."""
    for module in _MODULES:
        importlib.import_module(module)


def serve(descriptor: int) -> None:
    """Import everything, then fork for every command until ended."""
    # As in tests/conftest.py.
    setattr(os, "fsync", os.fstat)  # noqa: B010
    import_all()
    assert threading.active_count() == 1, "what is forked beside threads may hang"
    # Nobody waits for those that carry commands out.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(fileno=descriptor) as listening:
        while True:
            connection, _ = listening.accept()
            if os.fork() == 0:
                listening.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _answer(connection)
            connection.close()


def _answer(connection: socket.socket) -> NoReturn:
    head, descriptors, _, _ = socket.recv_fds(connection, 8, 3)
    request, missing = b"", int(head)
    while missing > len(request):
        request += connection.recv(missing - len(request))
    child = os.fork()
    if child == 0:
        connection.close()
        _become(json.loads(request), descriptors)
    connection.sendall(f"{child:16d}".encode())
    _, status = os.waitpid(child, 0)
    connection.sendall(f"{status:16d}".encode())
    os._exit(0)


def _become(request: Mapping[str, Any], descriptors: Sequence[int]) -> NoReturn:
    """Be the command: its streams, environment, folder and arguments, then its exit code."""
    code = 1
    try:
        signal.alarm(int(request["timeout"]))
        # Whoever started pytest may have had Ctrl-C ignored, which children inherit.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if request.get("session"):
            os.setsid()
        for number, descriptor in enumerate(descriptors, 3 - len(descriptors)):
            os.dup2(descriptor, number)
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["cwd"])
        sys.argv = ["flowmill", *request["arguments"]]
        sys.path[:0] = [entry for entry in request["env"].get("PYTHONPATH", "").split(":") if entry]
        from prefect.context import refresh_global_settings_context

        refresh_global_settings_context()
        _run_command(request["arguments"])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        if not isinstance(sys.exception(), SystemExit | None):
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        threading._shutdown()
        os._exit(code)


def _run_command(arguments: Sequence[str]) -> None:
    """Carry out a command line of flowmill, or, after ``-c``, a piece of Python, or be an agent with ranks."""
    if arguments[:1] == [AGENT]:
        be_agent = importlib.import_module(_AGENTS).be_agent

        be_agent(arguments[1:])
        return
    if arguments[:1] == ["-c"]:
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
        return
    from flowmill.flows.cli import main

    main()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
