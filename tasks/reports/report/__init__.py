"""Reports: what a run, or several beside each other, came to, as one HTML file that needs nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from configs.lazy_import import deferred

if TYPE_CHECKING:
    from tasks.runs.context import RunContext


def run_report(*contexts: RunContext, price: float | None = None) -> str:
    """Return the HTML of a report of one run, or of several beside each other.

    Args:
        contexts: the runs.
        price: of an hour of work, to say what a run cost.

    Raises:
        CorruptError: a file of a run is damaged.
    """
    with deferred("torch"):
        from tasks.reports.report.content import read_run

        read = [read_run(context) for context in contexts]
    # Only now: what draws takes seconds to import.
    from tasks.reports.report.page import page

    return page(read, price=price)
