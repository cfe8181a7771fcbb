"""``flowmill`` with CPU time and rows of every epoch: ``python -m tools.benchmarks.ours COUNTS ARGUMENTS ...``."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import psutil

from tools.benchmarks.work import Rows


def cpu_of_all() -> float:
    """Return the CPU seconds of this process and of all it started, those that have ended included."""
    own = psutil.Process()
    return sum(sum(process.cpu_times()[:4]) for process in (own, *own.children(recursive=True)))


class Marks:
    """What had been taken when each epoch was logged, all of it: whatever comes between two marks is of one epoch."""

    def __init__(self, rows: Rows) -> None:
        """Mark from now on."""
        from flowmill.tasks.tracking.tracker import Tracker

        self._taken: list[dict[str, float]] = []
        log_epoch = Tracker.log_epoch

        def marked(tracker: Any, epoch: int) -> None:
            log_epoch(tracker, epoch)
            self._taken.append({"cpu": cpu_of_all(), **rows.counted()})

        Tracker.log_epoch = marked  # type: ignore[method-assign, assignment]

    def epochs(self) -> list[dict[str, float]]:
        """Return what every epoch but the first took."""
        return [
            {name: after[name] - before[name] for name in after} for before, after in itertools.pairwise(self._taken)
        ]


if __name__ == "__main__":
    marks, counts = Marks(Rows()), Path(sys.argv.pop(1))
    from flowmill.flows.cli import main

    try:
        main()
    finally:
        counts.write_text(json.dumps(marks.epochs()))
