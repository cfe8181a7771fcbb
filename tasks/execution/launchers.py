"""Launchers of torchrun's agents: one agent on this machine, or one on each of several machines.

A launcher returns commands; ``launch`` starts them, communicates with them and ends them, in the same way for all.
"""

from __future__ import annotations

import os
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol

from pydantic import Field

from flowmill.configs.addresses import is_loopback
from flowmill.configs.errors import ConfigError
from flowmill.configs.execution import ExecutionSection
from flowmill.configs.registry import Table, chosen

LAUNCHERS = Table(
    {
        "local": "flowmill.tasks.execution.launchers:Local",
        "agents": "flowmill.tasks.execution.launchers:Agents",
    },
    like="flowmill.tasks.execution.launchers:Launcher",
)
#: Commands that run the rest of their command line on other machines.
_AWAY = ("ssh", "srun", "kubectl")
_AGENT, _RANK = (Path(__file__).with_name(name) for name in ("agent.py", "rank.py"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The program of every rank."""

    module: str
    """Module whose ``__main__`` is decorated with torch's ``record``."""
    arguments: tuple[str, ...] = ()
    processes: int = 1
    """Ranks per node."""
    nodes: int = 1
    """Machines."""


class Launcher(Protocol):
    """Returns the commands that start agents."""

    def commands(self, program: Program, logs: Path) -> list[list[str]]:
        """Return the command of every process to start here; together they start the agents of all nodes.

        Args:
            program: the program of the ranks.
            logs: folder for the error files of ranks on this machine.
        """


def make_launcher(section: ExecutionSection) -> Launcher:
    """Return the launcher of agents."""
    return chosen(LAUNCHERS, section.launcher, label="execution.launcher")  # type: ignore[no-any-return]


def check_launcher(section: ExecutionSection) -> None:
    """Check that the launcher can start the configured number of nodes."""
    make_launcher(section).commands(Program(module="", processes=section.processes, nodes=section.nodes), Path())


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """One agent on this machine."""

    def commands(self, program: Program, logs: Path) -> list[list[str]]:
        """Return the command of one standalone agent."""
        if program.nodes != 1:
            raise ConfigError(
                f"execution.nodes is {program.nodes}, but execution.launcher 'local' starts processes on this machine "
                "alone. Set execution.launcher to 'agents', see docs/scaling.md."
            )
        return [_agent(program, "127.0.0.1:0", logs)]


_PREFIXES = "Give one list of words per process to start, [] for none before it."


@dataclass(frozen=True, slots=True, kw_only=True)
class Agents:
    """An agent per node, each started by its own command or all by one; they meet at an address of one node."""

    endpoint: Annotated[str, Field(pattern=r"^.+:[0-9]+$"), "Write it as 'host:port'."]
    """``host:port`` of the rendezvous: one of the nodes, and a free port."""
    prefixes: Annotated[tuple[tuple[str, ...], ...], Field(min_length=1), _PREFIXES]
    """Prefix of torchrun's command, once per process started here: ``[[ssh, node1], [ssh, node2]]``, or
    ``[[srun, --nodes=2, --ntasks-per-node=1]]``, which starts all; ``[[], []]`` starts two on this machine."""
    python: str | None = None
    """The interpreter on the nodes; by default that of this process. flowmill is installed in the same folder on all of
    them."""

    def commands(self, program: Program, logs: Path) -> list[list[str]]:
        """Return one command per prefix."""
        host, away = self.endpoint.rpartition(":")[0], next((p[0] for p in self.prefixes if p and p[0] in _AWAY), None)
        if away is not None and is_loopback(host):
            raise ConfigError(
                f"execution.launcher: the endpoint '{self.endpoint}' is a loopback address, which every machine has "
                f"for itself, but '{away}' starts agents on others. Name one of them, as the others reach it."
            )
        # A unique id prevents a rendezvous with ranks of an earlier start that are still ending.
        start = uuid.uuid4().hex[:12]
        agents = enumerate(self.prefixes)
        return [
            [*prefix, *_agent(program, self.endpoint, logs / f"agent{i}", start, self.python)] for i, prefix in agents
        ]


def _agent(program: Program, endpoint: str, logs: Path, start: str = "start", python: str | None = None) -> list[str]:
    """Return the command of one torchrun agent."""
    settings = {
        "PYTHONUNBUFFERED": "1",
        # Files in the user's working directory must not shadow libraries. See rank.py.
        "PYTHONSAFEPATH": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    environment = ["env", *(f"{name}={value}" for name, value in settings.items())]
    # No restarts by torchrun: with gloo they are unreliable, and flowmill restarts from committed checkpoints.
    options = {
        "nnodes": program.nodes,
        "nproc-per-node": program.processes,
        "rdzv-endpoint": endpoint,
        "rdzv-id": f"flowmill-{start}",
        "max-restarts": 0,
        "monitor-interval": 0.2,
        "log-dir": logs,
    }
    torchrun = [python or sys.executable, "-u", str(_AGENT), endpoint.rpartition(":")[0], str(program.nodes)]
    flags = [f"--{name}={value}" for name, value in options.items()]
    return [*environment, *torchrun, *flags, str(_RANK), program.module, *program.arguments]
