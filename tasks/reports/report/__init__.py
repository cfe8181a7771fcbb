"""Reports: the results of one or several runs as one self-contained HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from flowmill.configs.errors import StoreError

if TYPE_CHECKING:
    from flowmill.tasks.runs.context import RunContext


def run_report(*contexts: RunContext, price: float | None = None) -> str:
    """Return the HTML of a report of one or several runs.

    Args:
        price: price of an hour of work, to show the cost of a run.
    """
    from flowmill.tasks.reports.report.page import page
    from flowmill.tasks.reports.report.reading import read_run

    return page([read_run(context) for context in contexts], price=price)


def check_report(file: Path) -> None:
    """Check that ``save_report`` may write a file, before the work that the report is of."""
    from flowmill.tasks.export.copying import check_place

    if not file.exists():
        check_place(file)
        return
    try:
        file.open("a").close()
    except OSError as error:
        raise _unwritable(file, error) from None


def save_report(html: str, file: Path) -> Path:
    """Write a report, and return its file."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(html)
    except OSError as error:
        raise _unwritable(file, error) from None
    return file


def _unwritable(file: Path, error: OSError) -> StoreError:
    return StoreError(f"The report cannot be written to '{file}' ({error.strerror}). Name another file.")
