"""Command lines without the seconds that imports take: a process that has imported everything forks one for each.

Every command is a process of its own, with its own environment, folder and output, and goes through ``flows.cli.main``.
What is read while modules are imported is that of the process that forks: variables of ``READ_AT_IMPORT`` need a start
of their own.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parent.parent
READ_AT_IMPORT = ("COLUMNS", "PREFECT_", "MLFLOW_", "OMP_", "TORCH", "HF_", "PYTHONHASHSEED")
_MODULES = (
    "flows.cli.run",
    "flows.cli.stage",
    "flows.pipeline",
    "flows.stages",
    "tasks.tracking.client",
    "mlflow",
    "models.policies.sd3",
    "models.quickstart.build",
    "models.lora",
    "peft",
    "diffusers.loaders.lora_pipeline",
    "diffusers.models.transformers.transformer_sd3",
    "diffusers.models.autoencoders.autoencoder_kl",
    "diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3",
    "tasks.stages.optimize",
    "tasks.optimize.epoch",
    "tasks.stages.export",
    "tasks.check",
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
            command = [sys.executable, "-m", "tests.preloaded", str(listening.fileno())]
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=dict(environment), pass_fds=[listening.fileno()], stderr=subprocess.DEVNULL
            )

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait(10)
        self._folder.cleanup()


def carry_out(
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
        arguments: of ``flowmill``.
        streams: descriptors of its output and its errors.
        cwd: its folder.
        env: its environment.
        timeout: seconds after which a signal ends it.
    """
    request = json.dumps({"arguments": list(arguments), "cwd": cwd, "env": dict(env), "timeout": timeout}).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        socket.send_fds(connection, [f"{len(request):8d}".encode()], list(streams))
        connection.sendall(request)
        return os.waitstatus_to_exitcode(int(connection.recv(16)))


def serve(descriptor: int) -> None:
    """Import everything, then fork for every command until ended."""
    for module in _MODULES:
        importlib.import_module(module)
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
    head, descriptors, _, _ = socket.recv_fds(connection, 8, 2)
    request, missing = b"", int(head)
    while missing > len(request):
        request += connection.recv(missing - len(request))
    child = os.fork()
    if child == 0:
        connection.close()
        _become(json.loads(request), descriptors)
    _, status = os.waitpid(child, 0)
    connection.sendall(f"{status:16d}".encode())
    os._exit(0)


def _become(request: Mapping[str, Any], descriptors: Sequence[int]) -> NoReturn:
    """Be the command: its streams, environment, folder and arguments, then its exit code."""
    code = 1
    try:
        signal.alarm(int(request["timeout"]))
        for number, descriptor in enumerate(descriptors, 1):
            os.dup2(descriptor, number)
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["cwd"])
        sys.argv = ["flowmill", *request["arguments"]]
        sys.path[:0] = [entry for entry in request["env"].get("PYTHONPATH", "").split(":") if entry]
        from flows.cli import main

        main()
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


if __name__ == "__main__":
    serve(int(sys.argv[1]))
