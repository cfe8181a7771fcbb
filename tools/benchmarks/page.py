"""Tables that are measured, in the pages that show them: between two comments, below the machine and the day."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from pathlib import Path


def machine() -> str:
    """Return what a table was measured on, and when."""
    load = os.getloadavg()[0]
    return f"{os.cpu_count()} cores ({platform.machine()}), load {load:.1f} when it began, {datetime.now(UTC):%Y-%m-%d}"


def write(page: Path, name: str, table: str, measured: str) -> None:
    """Put a table in its place.

    Args:
        page: the page.
        name: of the table.
        table: Markdown.
        measured: on what, and when.

    Raises:
        ValueError: the page has no place of this name, or one without end.
    """
    text, begin, end = page.read_text(), f"<!-- measured: {name} -->", "<!-- end -->"
    if begin not in text:
        raise ValueError(f"{page} has no '{begin}'")
    head, rest = text.split(begin, 1)
    place, found, tail = rest.partition(end)
    if not found or "<!-- measured:" in place:
        raise ValueError(f"{page}: '{begin}' has no '{end}' of its own")
    page.write_text(f"{head}{begin}\n\n{table.strip()}\n\n({measured})\n\n{end}{tail}")
