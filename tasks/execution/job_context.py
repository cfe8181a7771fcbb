"""Context of a process that runs jobs."""

from __future__ import annotations

from collections.abc import Callable

from storage.artifacts.commit import ArtifactStore
from storage.artifacts.lineage import RunFolder
from storage.layout import ArtifactRef
from tasks.execution.execution import Execution
from tasks.execution.job_spec import JobSpec
from tasks.runs.context import RunContext
from tasks.runs.progress import Reporter
from tasks.stages.stage import Stage


class JobExecution:
    """Execution of the current job, kept with its models for all jobs of one run."""

    def __init__(self) -> None:
        """Start without a run."""
        self._order: JobSpec | None = None
        self._execution: Execution | None = None

    def of(self, order: JobSpec, reporter: Callable[[], Reporter], on_open: Callable[[Execution], None]) -> Execution:
        """Return the execution of a job's run; a job of another run or config releases the models.

        Args:
            order: the job.
            reporter: makes the progress reporter.
            on_open: called with a new execution.
        """
        execution, known = self._execution, self._order
        if execution is None or known is None or known.settings != order.settings:
            # Reset first: if the new execution cannot be opened, the next try must not use the old one.
            self._execution = self._order = None
            if execution is not None:
                execution.close()
            execution = _executed(order, reporter())
            on_open(execution)
        elif (known.node, known.artifact) != (order.node, order.artifact):
            execution.context.refresh()
        self._execution, self._order = execution, order
        return execution


def stage_of_job(order: JobSpec, execution: Execution) -> Stage:
    """Return the stage that a job names, with the artifacts it names."""
    epoch, name, slot = order.node
    stage = execution.stage(name, epoch, slot)
    stage.adopt(ArtifactRef.parse(order.artifact), [ArtifactRef.parse(ref) for ref in order.inputs])
    return stage


def _executed(order: JobSpec, reporter: Reporter) -> Execution:
    config = order.parsed_config()
    store = ArtifactStore(config.store)
    return Execution(RunContext(store, config, RunFolder(store, order.run), reporter=reporter, epoch=order.epoch))
