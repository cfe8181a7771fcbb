"""The contract of executors, which run shards of stages: in processes, on ranks, or as tasks of flows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from flowmill.tasks.stages.stage import Shard
from flowmill.tasks.stages.stage_run import StageRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """Receives the messages of an executor."""

    on_commit: Callable[[Sequence[str]], None] = lambda names: None
    """Called with the names of shards soon after their commit, possibly on another thread."""
    on_look: Callable[[], None] = lambda: None
    """Called repeatedly while the caller waits; an exception ends the work."""


SILENT = Listener()


class Executor(Protocol):
    """One way to run shards; a class is created from a ``Session``, see ``Session.executor``."""

    def start(self) -> None:
        """Start processes or connections, unless they are started; ``run`` does so when it needs them."""

    def run(self, run: StageRun, shards: Iterable[Shard], listener: Listener = SILENT) -> list[str]:
        """Run and commit shards of a stage; return the names of the committed ones."""

    def close(self) -> None:
        """End processes and connections."""
