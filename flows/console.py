"""The console: tables that are never cut, and JSON alone."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from configs.visible import visible


class _Console(Console):
    """A console that prints texts of others as they are: no markup, no emoji's name, no control character of them."""

    def __init__(self, **how: Any) -> None:
        """Create it, see ``rich.console.Console``."""
        super().__init__(highlight=False, soft_wrap=True, markup=False, emoji=False, **how)

    def render_str(self, text: str, **how: Any) -> Text:
        """Return a text, or a table's cell, as it is drawn, see ``rich.console.Console``."""
        return super().render_str(visible(text, keep="\n\t"), **how)


console = _Console()
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
    _Console(width=width, file=console.file).print(table, width=None, crop=False)


def print_json(data: Any) -> None:
    """Print data as JSON and nothing else."""
    console.file.write(json.dumps(data, indent=2, sort_keys=False) + "\n")
