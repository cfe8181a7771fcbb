"""The execution of a run: its context, models of this process, and ranks."""

from __future__ import annotations

from functools import cached_property

from tasks.execution.runners import make_runner
from tasks.execution.worker_group import WorkerGroup
from tasks.runs.context import RunContext
from tasks.runtime.host import ModelHost
from tasks.specs.graph import Node
from tasks.stages.stage import Stage, make_stage


class Execution:
    """Context, models and ranks for the stages of one run in one process."""

    def __init__(self, context: RunContext) -> None:
        """Bind to a run; no model is loaded and no rank is started yet."""
        self.context = context
        self.host = ModelHost(context)
        """Holds the run's models in this process."""
        self.elsewhere = make_runner(context.config.execution).elsewhere
        """Whether independent shards go to other processes one by one."""

    @cached_property
    def crew(self) -> WorkerGroup:
        """The run's resident ranks."""
        execution, reporter = self.context.config.execution, self.context.reporter
        return WorkerGroup(execution, reporter)

    def stage(self, name: str, epoch: int, slot: str = "") -> Stage:
        """Return a stage bound to context and models.

        Raises:
            ConfigError: there is no such stage, or it does not exist for this epoch or slot.
        """
        return make_stage(self.context, self.host, Node(epoch, name, slot))

    def begin_epoch(self) -> None:
        """Restart the ranks if they have reached ``execution.resident_epochs``."""
        if "crew" in vars(self):
            self.crew.begin_epoch()

    def close(self) -> None:
        """Release models and ranks; later requests load and start them again."""
        self.host.release()
        if "crew" in vars(self):
            self.crew.close()
