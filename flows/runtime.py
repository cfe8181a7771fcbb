"""What the flows and tasks of one process share: open workspaces by store and run, and who shows progress."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from configs.load import load_config
from configs.schema import RunConfig
from tasks.progress import Reporter
from tasks.runs import begin_run, open_run
from tasks.stage import Stage
from tasks.stages import make_stage
from tasks.workspace import Workspace


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


_workspaces: dict[tuple[str, str], Workspace] = {}
_stages: dict[tuple[str, str, str, int, str], Stage] = {}
_reporter: list[Reporter] = []


def use_reporter(reporter: Reporter) -> None:
    """Show the progress of every workspace opened from here on with this reporter."""
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


def begin(config: RunConfig) -> Workspace:
    """Return the workspace of a run that is started or continued in this process."""
    workspace = begin_run(config, reporter=reporter())
    return remember(workspace)


def remember(workspace: Workspace) -> Workspace:
    """Keep a workspace for the tasks of this process; one that is already open stays."""
    key = (workspace.store.root.uri, workspace.run.name)
    return _workspaces.setdefault(key, workspace)


def forget(workspace: Workspace) -> None:
    """Drop a workspace and its models."""
    _workspaces.pop((workspace.store.root.uri, workspace.run.name), None)
    for key in [key for key, stage in _stages.items() if stage.workspace is workspace]:
        del _stages[key]


def workspace(root: str, run: str) -> Workspace:
    """Return the open workspace of a run, opening it from the store in a process that has not yet.

    Raises:
        StoreError: there is no such run.
    """
    if (root, run) not in _workspaces:
        remember(open_run(root, run, reporter=reporter()))
    return _workspaces[root, run]


def keep_stage(stage: Stage) -> None:
    """Keep a stage for the shard tasks of this process; those of earlier epochs are dropped."""
    for key in [key for key, kept in _stages.items() if kept.name == stage.name and kept.slot == stage.slot]:
        del _stages[key]
    _stages[_stage_key(stage)] = stage


def find_stage(root: str, run: str, name: str, epoch: int, slot: str) -> Stage:
    """Return a kept stage, or a new one in a process that has not seen it."""
    return _stages.get((root, run, name, epoch, slot)) or make_stage(workspace(root, run), name, epoch, slot)


def _stage_key(stage: Stage) -> tuple[str, str, str, int, str]:
    return (stage.workspace.store.root.uri, stage.workspace.run.name, stage.name, stage.epoch, stage.slot)
