"""The work on a run in one process: its context, the models, and the executors of its shards."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar, cast

from flowmill.tasks.execution.executor import Executor
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runtime.host import ModelHost
from flowmill.tasks.specs.graph import Node
from flowmill.tasks.stages.stage import Stage, make_stage

E = TypeVar("E", bound=Executor)


class Session:
    """Context, models and executors for the stages of one run in one process."""

    def __init__(self, context: RunContext) -> None:
        """Bind to a run; no model is loaded and no executor is started yet."""
        self.context = context
        self.host = ModelHost(context)
        """Holds the run's models in this process."""
        self._executors: dict[Callable[[Session], Executor], Executor] = {}
        self._lock = threading.Lock()

    def stage(self, node: Node) -> Stage:
        """Return a stage bound to context and models."""
        return make_stage(self.context, self.host, node)

    def executor(self, kind: Callable[[Session], E]) -> E:
        """Return the executor of a kind, created on first use and closed with the session."""
        with self._lock:
            if kind not in self._executors:
                self._executors[kind] = kind(self)
            return cast(E, self._executors[kind])

    def close(self) -> None:
        """Release models and executors; later requests load and start them again."""
        # The last first: tasks of flows wait for the processes that they have started.
        for executor in reversed(self._executors.values()):
            executor.close()
        self._executors.clear()
        self.host.release()
