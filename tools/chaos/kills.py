"""Kills a small run at random moments, continues it each time, and compares it with an uninterrupted one."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.preloaded import Forked

#: What is in the command lines of a run's processes.
_KINDS = {"prefect_app": "server", "spawn_main": "Dask worker", "agent.py": "agent", "rank.py": "rank"}
ROOT = Path(__file__).parent.parent.parent


@dataclass(frozen=True)
class Outcome:
    """What a series of kills came to."""

    digest: str
    """Digest of the finished run."""
    kills: int
    """Kills that hit a running process."""
    stages: tuple[str, ...]
    """Which process each kill hit, and how much was committed by then."""


def start(arguments: list[str], environment: dict[str, str], *, fork: str = "") -> subprocess.Popen[bytes]:
    """Start ``flowmill`` in a process group of its own.

    Args:
        arguments: of the command.
        environment: its environment.
        fork: what forks command lines, where a start need not be one from nothing.
    """
    if fork:
        return Forked(fork, arguments, cwd=ROOT, env=environment)  # type: ignore[return-value]
    command = [sys.executable, "-m", "flowmill.flows.cli", *arguments]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        # A shell that started us in the background had Ctrl-C ignored, which children inherit.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def digest(root: str, run: str, environment: dict[str, str]) -> str:
    """Return the digest of a run."""
    arguments = [sys.executable, "-m", "flowmill.flows.cli", "store", "digest", run, "--root", root]
    return subprocess.run(
        arguments, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    ).stdout.strip()


def records(root: str) -> int:
    """Return how many commit records, manifests and lineage entries a store holds: a clock of the run's progress."""
    # Not by rglob: folders that vanish while it looks stop it.
    return sum(name.endswith(".json") for _, _, names in os.walk(root) for name in names)


def uninterrupted(config: str, root: str, environment: dict[str, str], *, fork: str = "") -> str:
    """Run to the end and return the digest."""
    process = start(["run", config, "--root", root, "--quiet"], environment, fork=fork)
    output = process.communicate(timeout=1200)[0].decode()
    if process.returncode:
        raise SystemExit(output)
    return digest(root, "small", environment)


def killed(config: str, root: str, environment: dict[str, str], *, kills: int, seed: int, fork: str = "") -> Outcome:
    """Kill processes of the run ``kills`` times at random moments after it has begun to commit, then let it finish.

    Without ranks it is the run itself that is killed; with ranks it is the run, torchrun's agent, or one of the ranks.
    """
    rng = random.Random(seed)
    hits: list[str] = []
    while len(hits) < kills:
        process = start(["run", config, "--root", root, "--quiet"], environment, fork=fork)
        while len(hits) < kills:
            before = records(root)
            # Wait for new work, then for a random moment within it: kills spread over the whole run, not over start-up.
            while process.poll() is None and records(root) <= before:
                time.sleep(0.005)
            time.sleep(rng.random() * 0.4)
            if process.poll() is not None:
                break
            found = {kind: alive for kind, alive in victims(process.pid).items() if kind in ("parent", "agent", "rank")}
            name = rng.choice(list(found))
            victim = rng.choice(found[name])
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()
                hits.append(f"{name} at {records(root)} records")
            if victim.pid == process.pid:
                process.wait()
                break
        if process.poll() == 0:
            break
        if process.poll() is None:
            process.kill()
            process.wait()
    return Outcome(uninterrupted(config, root, environment, fork=fork), len(hits), tuple(hits))


def victims(pid: int) -> dict[str, list[psutil.Process]]:
    """Return the processes of a run that can be killed now, by what they are: parent, group, server, agent, rank."""
    run = psutil.Process(pid)
    family = [run]
    with contextlib.suppress(psutil.NoSuchProcess):
        family += run.children(recursive=True)
    found: dict[str, list[psutil.Process]] = {"parent": [run]}
    for member in family:
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            command = " ".join(member.cmdline())
            if os.getpgid(member.pid) == pid:
                found.setdefault("group", []).append(member)
            # torchrun's agent names the rank's program too.
            kind = next((kind for word, kind in _KINDS.items() if word in command), None)
            if kind:
                found.setdefault(kind, []).append(member)
    return found


def orphans(marker: str) -> list[int]:
    """Return live processes whose environment names a marker, and those that were forked, which do not show theirs."""
    found = [forked.pid for forked in Forked.all if forked.poll() is None]
    for process in psutil.process_iter(["pid", "status"]):
        try:
            if process.info["status"] != psutil.STATUS_ZOMBIE and marker in process.environ().get("FLOWMILL_TEST", ""):
                found.append(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found
