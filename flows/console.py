"""The console: tables that are never cut, and JSON alone."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from configs.visible import visible


class _Console(Console):
    """A console that prints texts of others as they are: no control character of them reaches the terminal."""

    def print(self, *objects: Any, **how: Any) -> None:
        """Print, see ``rich.console.Console.print``."""
        super().print(*(visible(each, keep="\n\t") if isinstance(each, str) else each for each in objects), **how)


console = _Console(highlight=False, soft_wrap=True)
_UNLIMITED = 100_000


def print_table(table: Table, *, folding: Collection[str] = ()) -> None:
    """Print a table with no cell cut, and none folded but those of prose.

    Where it is wider than the terminal nevertheless, its lines are too.

    Args:
        table: the table.
        folding: headers of columns whose cells may take several lines.
    """
    for column in table.columns:
        column.no_wrap = column.header not in folding
        column.overflow = "fold"
    wide = console.options.update(max_width=_UNLIMITED)
    needed = Measurement.get(console, wide, table)
    width = max(console.width, needed.minimum if folding else needed.maximum)
    # A console of its own: rich cuts what is wider than the terminal, whatever it is told.
    Console(highlight=False, soft_wrap=True, width=width, file=console.file).print(table, width=None, crop=False)


def print_json(data: Any) -> None:
    """Print data as JSON and nothing else."""
    console.file.write(json.dumps(data, indent=2, sort_keys=False) + "\n")
