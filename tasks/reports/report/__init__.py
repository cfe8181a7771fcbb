"""Reports: the results of one or several runs as one self-contained HTML file."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tasks.runs.context import RunContext


def run_report(*contexts: RunContext, price: float | None = None) -> str:
    """Return the HTML of a report of one or several runs.

    Args:
        contexts: the runs.
        price: price of an hour of work, to show the cost of a run.

    Raises:
        CorruptError: a file of a run is damaged.
    """
    from tasks.reports.report.page import page
    from tasks.reports.report.reading import read_run

    return page([read_run(context) for context in contexts], price=price)
