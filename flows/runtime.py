"""What the flows and tasks of one process share: the runs that are open in it, and who shows progress."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from configs.load import load_config
from configs.schema import RunConfig
from tasks.context import RunContext
from tasks.progress import Reporter
from tasks.runs import begin_run, open_run


class LogReporter:
    """Progress as log lines, for runs under a Prefect worker."""

    def __init__(self) -> None:
        """Log to Prefect's run logger, which the UI shows."""
        self._log = logging.getLogger("prefect.flow_runs.flowmill")

    def progress(self, stage: str, epoch: int, done: int, total: int, detail: str = "") -> None:
        """Log finished stages only."""
        if done == total:
            self._log.info("epoch %d %s %d/%d %s", epoch, stage, done, total, detail)

    def message(self, text: str) -> None:
        """Log one line."""
        self._log.info(text)


_contexts: dict[tuple[str, str], RunContext] = {}
_reporter: list[Reporter] = []


def use_reporter(reporter: Reporter) -> None:
    """Show the progress of every run opened from here on with this reporter."""
    _reporter[:] = [reporter]


def reporter() -> Reporter:
    """Return who shows progress."""
    return _reporter[0] if _reporter else LogReporter()


def configured(config: str, root: str | None, name: str | None, overrides: Sequence[str]) -> RunConfig:
    """Return the config a run is started with: file, overrides, then root and name.

    Raises:
        ConfigError: something in it cannot work.
    """
    extra = [*overrides]
    if root is not None:
        extra.append(f"store.root={root}")
    if name is not None:
        extra.append(f"run.name={name}")
    return load_config(config, extra)


def begin(config: RunConfig) -> RunContext:
    """Return the context of a run that is started or continued in this process; one that is open already stays."""
    context = begin_run(config, reporter=reporter())
    return _contexts.get(_key(context), context)


@contextmanager
def opened(context: RunContext) -> Iterator[RunContext]:
    """Let the tasks of this process find a run, inside; its ranks and models are released afterwards."""
    key = _key(context)
    before = _contexts.get(key)
    _contexts[key] = context
    try:
        yield context
    finally:
        context.close()
        del _contexts[key]
        if before is not None:
            _contexts[key] = before


def context(root: str, run: str) -> RunContext:
    """Return the open context of a run, opening it from the store in a process that has not yet.

    Raises:
        StoreError: there is no such run.
    """
    if (root, run) not in _contexts:
        _contexts[root, run] = open_run(root, run, reporter=reporter())
    return _contexts[root, run]


def _key(context: RunContext) -> tuple[str, str]:
    return (context.store.root.uri, context.run.name)
