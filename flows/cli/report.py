"""``flowmill report``: the results of runs as one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from configs.errors import StoreError
from configs.escaping import quoted
from configs.lazy_import import deferred
from flows.console import console


def report_command(
    names: Sequence[str], *, root: str, out: Path | None, price: float | None = None, track: bool = False
) -> None:
    """Write the report of one run, or a comparison of several, and print its location.

    Raises:
        StoreError: there is no such run, or the file cannot be written.
        TrackingError: the tracker cannot be used.
    """
    with deferred("torch"):
        from tasks.reports.report import run_report
        from tasks.runs.opening import open_run

    contexts = [open_run(root, name, reads=True) for name in names]
    html = run_report(*contexts, price=price)
    save_report(html, out or Path(f"{'-'.join(names)}-report.html"))
    if track:
        from tasks.tracking.reports import log_report

        for context in contexts:
            console.print(f"logged to {log_report(context, html)}")


def save_report(html: str, file: Path) -> None:
    """Write a report and print its location.

    Raises:
        StoreError: the file cannot be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(html)
    except OSError as error:
        raise StoreError(f"The report cannot be written to '{file}' ({error.strerror}). Name another file.") from None
    console.print(f"report: {quoted(file)}")
