"""Runners of independent shards: threads of this process, or the workers of a Dask or Ray cluster.

A runner names one of Prefect's task runners and its arguments; only ``flows`` imports Prefect.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic import PositiveInt

from flowmill.configs.errors import ConfigError
from flowmill.configs.execution import ExecutionSection
from flowmill.configs.extras import require_extra
from flowmill.configs.registry import Table, chosen

#: Seconds within which the head of a cluster accepts a connection.
_CONNECT_S = 5.0
#: Seconds in which a cluster has to be well again, and in which one that scales itself has to get a worker.
_PATIENCE_S, _WORKER_S = 30.0, 1800.0
#: Waits for the end of its parent, which writes a byte before it ends by itself. Its arguments: host, port, address.
_WATCH = """
import socket, sys
if not sys.stdin.read(1):
    try:
        socket.create_connection(sys.argv[1:3], timeout=5).close()
    except OSError as error:
        sys.exit(
            f"flowmill: execution.runner 'ray' ended this process: its head {sys.argv[3]} does not answer ({error}). "
            "Committed shards stay: start the cluster again, then the same command continues."
        )
"""

RUNNERS = Table(
    {
        "threads": "flowmill.tasks.execution.runners:Threads",
        "dask": "flowmill.tasks.execution.runners:Dask",
        "ray": "flowmill.tasks.execution.runners:Ray",
    },
    like="flowmill.tasks.execution.runners:Runner",
)


class Runner(Protocol):
    """One way to run shards."""

    @property
    def elsewhere(self) -> bool:
        """True for other processes, which hold their own models; False for threads of this process."""

    @property
    def task_runner(self) -> str:
        """Import string of Prefect's task runner."""

    @property
    def remedy(self) -> str:
        """How a cluster is started that the task runner connects to, for messages."""

    def arguments(self, execution: ExecutionSection) -> Mapping[str, Any]:
        """Return the arguments of the task runner."""

    def connect(self, task_runner: Any) -> None:
        """Connect to the workers of a started task runner, so that a failure is reported before any shard is sent."""

    def fault(self, task_runner: Any) -> tuple[str, float]:
        """Return why a started task runner does not do its tasks, '' if it does, and how many seconds that may last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Threads:
    """``execution.score_workers`` threads or processes score while this process or its ranks roll out."""

    elsewhere = False
    task_runner = "prefect.task_runners:ThreadPoolTaskRunner"
    remedy = ""

    def arguments(self, execution: ExecutionSection) -> Mapping[str, Any]:
        """Return the number of threads."""
        return {"max_workers": score_workers(execution)}

    def connect(self, task_runner: Any) -> None:
        """Do nothing: threads need no connection."""

    def fault(self, task_runner: Any) -> tuple[str, float]:
        """Return '': threads end with this process."""
        return "", _PATIENCE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Dask:
    """A Dask cluster: a running one at ``address``, a new one of ``cluster_class``, or workers on this machine."""

    elsewhere = True
    task_runner = "prefect_dask:DaskTaskRunner"
    remedy = "'dask scheduler --port 8786' starts one, and 'dask worker tcp://HOST:8786' its workers."

    workers: PositiveInt | None = None
    """Processes to start on this machine, one shard each at a time; 2 when absent."""
    address: str | None = None
    """Scheduler of a running cluster: ``tcp://host:8786``."""
    cluster_class: str | None = None
    """Another kind of cluster to start: ``dask_cuda.LocalCUDACluster``, ``dask_jobqueue.SLURMCluster``."""
    cluster: dict[str, Any] = field(default_factory=dict)
    """Arguments of the cluster to start."""

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            ValueError: two contradict each other.
        """
        if self.address is not None and (self.cluster_class is not None or self.cluster):
            raise ValueError("address names a cluster that runs, so cluster_class and cluster do nothing; remove them.")
        if self.workers is not None and (self.address is not None or self.cluster_class is not None):
            raise ValueError(
                "workers are started on this machine, but address and cluster_class name other clusters: remove "
                "workers, or say in cluster how many the class starts."
            )

    def arguments(self, execution: ExecutionSection) -> Mapping[str, Any]:
        """Return the address, or the arguments of a local cluster on loopback."""
        require_extra("dask", "prefect_dask", label="execution.runner 'dask'")
        if self.address is not None:
            return {"address": self.address}
        if self.cluster_class is not None:
            return {"cluster_class": self.cluster_class, "cluster_kwargs": self.cluster}
        # Models may fill the memory: Dask's nanny must not end workers at its own memory limit.
        local = {"n_workers": self.workers or 2, "threads_per_worker": 1, "memory_limit": 0}
        return {"cluster_kwargs": {**local, "host": "127.0.0.1", "dashboard_address": "127.0.0.1:0", **self.cluster}}

    def connect(self, task_runner: Any) -> None:
        """Start the cluster and its client now; by default they start with the first shard."""
        # The message of the run says why it ends.
        logging.getLogger("distributed.client").setLevel(logging.CRITICAL)
        _ = task_runner.client

    def fault(self, task_runner: Any) -> tuple[str, float]:
        """Return the state of the connection to the scheduler, or that a running cluster has no worker."""
        client = task_runner.client
        # Workers of a cluster that was started for the run may wait in a queue of its machines.
        if client.status != "running" or self.address is None:
            lost = "" if client.status == "running" else f"the connection to the scheduler is {client.status}"
            return lost, _PATIENCE_S
        try:
            cluster = client.sync(client.scheduler.identity, n_workers=1, callback_timeout=_CONNECT_S)
        except OSError as error:
            return f"the scheduler {self.address} does not answer ({type(error).__name__})", _PATIENCE_S
        return "" if cluster["workers"] else f"no worker is connected to the scheduler {self.address}", _WORKER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Ray:
    """A running Ray cluster. None is started here: it would listen on every interface and run any received code."""

    elsewhere = True
    task_runner = "prefect_ray:RayTaskRunner"
    remedy = "'ray start --head --port=6379' starts one, of the version that is installed here."

    address: str
    """``host:6379`` of a cluster that includes this machine, or ``ray://host:10001``."""
    init: dict[str, Any] = field(default_factory=dict)
    """Further arguments of ``ray.init``."""

    def __post_init__(self) -> None:
        """Check the address.

        Raises:
            ValueError: it has no port.
        """
        if not self._head[1].isdigit():
            raise ValueError(f"address is '{self.address}', which has no port. Give host:6379 or ray://host:10001.")

    def arguments(self, execution: ExecutionSection) -> Mapping[str, Any]:
        """Return the address."""
        require_extra("ray", "prefect_ray", label="execution.runner 'ray'")
        # One try to reach the head takes 41 s, and Ray makes 20. Set here alone, as it limits the start of heads too.
        os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "1")
        return {"address": self.address, "init_kwargs": {"log_to_driver": False, **self.init}}

    def connect(self, task_runner: Any) -> None:
        """Start a process that says so if Ray ends this one without a word: it does a minute after its head is gone."""
        command = [sys.executable, "-c", _WATCH, *self._head, self.address]
        watch = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        atexit.register(watch.communicate, b"ended by itself")

    @property
    def _head(self) -> tuple[str, str]:
        host, _, port = self.address.rpartition("//")[2].rpartition(":")
        return host.strip("[]"), port

    def fault(self, task_runner: Any) -> tuple[str, float]:
        """Return that the head or all nodes are gone."""
        import ray

        try:
            socket.create_connection(self._head, timeout=_CONNECT_S).close()
        except OSError as error:
            return f"its head {self.address} does not answer ({error})", _PATIENCE_S
        return "" if any(node["Alive"] for node in ray.nodes()) else f"no node of {self.address} is alive", _PATIENCE_S


def score_workers(section: ExecutionSection, *, on_rank: bool = False) -> int:
    """Return the number of shards that a process scores in parallel: as configured, or one per available core.

    Args:
        section: execution settings of the run.
        on_rank: the process is a rank and shares all cores with the others; else it uses the cores without a rank.
    """
    if section.score_workers is not None:
        return section.score_workers
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // section.processes if on_rank else cores - section.processes)


def make_runner(section: ExecutionSection) -> Runner:
    """Return the runner of shards."""
    return chosen(RUNNERS, section.runner, label="execution.runner")  # type: ignore[no-any-return]


def check_runner(section: ExecutionSection) -> None:
    """Check that shards can be distributed as configured."""
    runner = make_runner(section)
    runner.arguments(section)
    if runner.elsewhere and section.score_workers is not None:
        raise ConfigError(
            f"execution.score_workers is {section.score_workers}, but scores go to the workers of execution.runner "
            f"'{section.runner.name}'. Remove it."
        )
