"""The interface of places: what runs depend on and can lose."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.support import clusters
from tests.support.clusters import Started
from tools.chaos.kills import start

#: Seconds after which a disturbed run must have ended, or gone on to its end.
ENDS_S = 300.0
Run = Any
"""A process, or a flow run that behaves like one."""


class Place(contextlib.ExitStack):
    """Surroundings of the runs of one shape."""

    settings: tuple[str, ...] = ()
    """Of every run."""
    bucket = ""
    """Bucket of the stores."""

    def __init__(self, folder: Path, rng: random.Random, environment: Mapping[str, str]) -> None:
        """Start everything.

        Args:
            folder: of files of the servers.
            rng: draws victims.
            environment: of everything.
        """
        super().__init__()
        folder.mkdir()
        self.folder, self.rng = folder, rng
        self.environment = {**environment, "FLOWMILL_TEST": str(folder)}
        self.variables: dict[str, str] = {}
        """Of the runs."""
        self.disturbances: dict[str, Callable[[Run], None]] = {}
        self._next: list[str] = []
        self._begin()

    def _begin(self) -> None:
        """Start the servers, and fill the table of disturbances."""

    def disturb(self, run: Run) -> str:
        """Disturb a run in the next way, each way once before one is repeated; return its name."""
        if not self._next:
            self._next = self.rng.sample(list(self.disturbances), len(self.disturbances))
        name = self._next.pop()
        self.disturbances[name](run)
        return name

    def heal(self) -> None:
        """Start again or undo what was done."""

    def start(self, command: list[str], environment: Mapping[str, str]) -> Run:
        """Start a run."""
        settings = (word for setting in self.settings for word in ("--set", setting))
        return start([*command, *settings], {**environment, **self.variables})

    def left(self) -> list[str]:
        """Return what is not as it should be after the last run."""
        return []

    def keep(self, started: Started) -> Started:
        """Start a process, which ends with the place."""
        return self.enter_context(clusters.running(started))


def kill_run(run: Run) -> None:
    run.kill()
