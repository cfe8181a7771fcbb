"""The console: tables that are never cut, and JSON alone."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

console = Console(highlight=False, soft_wrap=True)
_UNLIMITED = 100_000


def print_table(table: Table) -> None:
    """Print a table with no cell cut or folded: where it is wider than the terminal, its lines are too."""
    wide = console.options.update(max_width=_UNLIMITED)
    width = max(console.width, Measurement.get(console, wide, table).maximum)
    for column in table.columns:
        column.no_wrap = True
    # A console of its own: rich cuts what is wider than the terminal, whatever it is told.
    Console(highlight=False, soft_wrap=True, width=width, file=console.file).print(table, width=None, crop=False)


def print_json(data: Any) -> None:
    """Print data as JSON and nothing else."""
    console.file.write(json.dumps(data, indent=2, sort_keys=False) + "\n")
