"""How long people wait before work begins: CPU and wall seconds of commands, their servers included.

python -m tools.benchmarks waits
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.artifacts.lineage import RunFolder
from flowmill.tasks.runs.locks import holding
from tools.benchmarks.learning import ROOT

PRESET = "digits_crd"
_ROUNDS = 3
#: The modules that ``make install`` compiles.
_COMPILED = re.compile(r"-c '(import [^']+)'")


class _Took(NamedTuple):
    cpu: float
    wall: float


def table() -> str:
    """Return a table: the least of three rounds, but of one for the first run on a new machine."""
    with tempfile.TemporaryDirectory(prefix="flowmill-waits-") as place:
        folder = Path(place)
        fresh = {name: str(folder / name) for name in ("PYTHONPYCACHEPREFIX", "XDG_CACHE_HOME", "PREFECT_HOME")}
        run, store = ["run", PRESET, "--root", str(folder / "store")], ArtifactStore(str(folder / "store"))
        # Python's own library is compiled where Python is installed.
        library = ["-m", "compileall", "-q", "-j2", "-x", "/(site-packages|test|tests)/", sysconfig.get_path("stdlib")]
        imports = _COMPILED.findall((ROOT / "Makefile").read_text())
        for arguments in [library, *(["-c", statement] for statement in imports)]:
            command = [sys.executable, *arguments]
            subprocess.run(command, env=_environment(fresh), stderr=subprocess.DEVNULL, check=True)
        rows = [
            (f"first `flowmill run {PRESET}` after installation", _timed(run, folder, fresh), "45 s"),
            ("`flowmill --help`", _least(lambda _: _timed(["--help"], folder)), "0.3 CPU s"),
            ("`flowmill check digits`", _least(lambda _: _timed(["check", "digits"], folder)), "3 CPU s"),
            ("`flowmill run` while another process executes that run", _refused(store, run, folder), "1 s"),
            ("`flowmill run` of a finished run", _least(lambda _: _timed(run, folder)), "1.5 s"),
            ("`flowmill run` until its first stage", _least(lambda n: _until(store, f"run-{n}", run, folder)), "5 s"),
        ]
    lines = [f"| {name} | {took.cpu:.2f} | {took.wall:.2f} | {goal} |" for name, took, goal in rows]
    return "\n".join(["| command | CPU s | wall s | goal |", "|---|---|---|---|", *lines]) + "\n"


def _least(measure: Callable[[int], _Took]) -> _Took:
    # The first round reads files from the disk.
    return min(measure(number) for number in range(_ROUNDS + 1))


def _refused(store: ArtifactStore, run: list[str], folder: Path) -> _Took:
    with holding(store, PRESET):
        return _least(lambda _: _timed(run, folder, code=1))


def _timed(arguments: list[str], folder: Path, variables: dict[str, str] | None = None, code: int = 0) -> _Took:
    before, begun = os.times(), time.monotonic()
    done = subprocess.run(
        _command(arguments), cwd=folder, env=_environment(variables), capture_output=True, check=False
    )
    after, wall = os.times(), time.monotonic() - begun
    if done.returncode != code:
        raise SystemExit(done.stderr.decode())
    return _Took(after.children_user + after.children_system - before.children_user - before.children_system, wall)


def _until(store: ArtifactStore, name: str, run: list[str], folder: Path) -> _Took:
    """Return the cost of a run until its first lineage entry; its base model is committed already."""
    begun = time.monotonic()
    command, silent = _command([*run, "--name", name, "--set", "run.seed=1"]), subprocess.DEVNULL
    with subprocess.Popen(command, cwd=folder, env=_environment(), stdout=silent, stderr=silent) as process:
        while not RunFolder(store, name).entries():
            if process.poll() is not None:
                raise SystemExit(f"{name} ended with {process.returncode}")
            time.sleep(0.02)
        wall, tree = time.monotonic() - begun, psutil.Process(process.pid)
        cpu = 0.0
        for each in [tree, *tree.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                times = each.cpu_times()
                cpu += times.user + times.system + times.children_user + times.children_system
        process.terminate()
    return _Took(cpu, wall)


def _command(arguments: list[str]) -> list[str]:
    return [sys.executable, "-m", "flowmill.flows.cli", *arguments]


def _environment(variables: dict[str, str] | None = None) -> dict[str, str]:
    # Some machines disable bytecode; installed commands have it.
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    return {**inherited, "PYTHONPATH": str(ROOT), **(variables or {})}


if __name__ == "__main__":
    sys.stdout.write(table())
